"""Which text have a row's tokens made so far, and does it end there? Whole characters, up to a stop text."""

from collections.abc import Callable, Sequence


class RowText:
    """The text of one row, token by token: what is certain is given at once, the rest is held back.

    A character is held back until it is complete, and text that may be the beginning of one of the ``stops`` until it
    is known not to be. ``spell`` is the tokenizer's decode. ``stopped`` turns true with the token that completes a stop
    text, wherever tokens begin and end in it: the text is what stands before the stop text that is complete first.
    Raises ValueError for an empty stop text.
    """

    def __init__(self, spell: Callable[[list[int]], str], stops: Sequence[str] = ()) -> None:
        if not all(stops):
            raise ValueError("a stop text is empty: every text would end at once")
        self.stopped = False
        self._spell, self._stops = spell, tuple(stops)
        self._seen: list[int] = []
        self._context = self._spelled = 0
        self._held = ""

    def add(self, token: int) -> str:
        """The text that is certain since ``token`` came."""
        self._seen.append(token)
        piece = self._after()
        if not piece or piece.endswith("\ufffd"):
            return ""
        self._context, self._spelled = self._spelled, len(self._seen)
        return self._before_stop(piece)

    def end(self) -> str:
        """The rest of the text, after the last token."""
        text = "" if self.stopped else self._before_stop(self._after())
        text, self._held = text + self._held, ""
        self._context = self._spelled = len(self._seen)
        return text

    def _after(self) -> str:
        # with the piece before as context: a tokenizer may treat the first token it is given specially
        before = self._spell(self._seen[self._context : self._spelled])
        return self._spell(self._seen[self._context :])[len(before) :]

    def _before_stop(self, piece: str) -> str:
        text = self._held + piece
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            # the one that ends first, and of these the longest: the same however the text is cut into tokens
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        starts = (n for stop in self._stops for n in range(1, len(stop)) if text.endswith(stop[:n]))
        certain = len(text) - max(starts, default=0)
        self._held = text[certain:]
        return text[:certain]
