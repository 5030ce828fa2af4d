"""How does one layer turn its keys by position? Rotary position embedding (Su et al., 2021), forwards and back."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Rope:
    """The rotation of one layer, read off the model.

    ``inv_freq`` ``[rotary_dim / 2]`` in radians a position; empty where a layer has no position encoding, and its
    keys stay as they are at any distance. ``start`` is the first turned component of a head
    (partial rotation turns only some; MLA turns the last ones). ``interleaved`` pairs component 2j with 2j+1
    (GPT-J, DeepSeek) instead of j with j + rotary_dim/2 (Llama, GPT-NeoX).
    """

    inv_freq: Tensor
    start: int = 0
    interleaved: bool = False

    @property
    def rotary_dim(self) -> int:
        """Components of a head that are turned."""
        return 2 * self.inv_freq.shape[0]

    def turn(self, x: Tensor, by: Tensor) -> Tensor:
        """``x`` ``[batch, heads, length, head_dim]`` turned by ``by`` positions.

        ``by`` is one number, ``[length]`` or ``[batch, length]``. A pure rotation: a scale that the family puts on
        its sines (YaRN) stays where it was. Turning by ``-p`` what was turned by ``p`` gives it back to rounding.
        """
        if not self.rotary_dim:
            return x
        # float32, and the position times the frequency in this order: what the families themselves compute, so
        # that turning back cancels their rounding at any position
        angle = by.to(device=x.device, dtype=torch.float32)[..., None] * self.inv_freq.to(x.device, torch.float32)
        cos, sin = torch.cos(angle), torch.sin(angle)
        if by.ndim == 2:
            cos, sin = cos[:, None], sin[:, None]
        part = x[..., self.start : self.start + self.rotary_dim]
        if self.interleaved:
            first, second = part[..., 0::2], part[..., 1::2]
        else:
            first, second = part.chunk(2, dim=-1)
        turned = (first * cos - second * sin, second * cos + first * sin)
        joined = torch.stack(turned, dim=-1).flatten(-2) if self.interleaved else torch.cat(turned, dim=-1)
        if self.rotary_dim == x.shape[-1]:
            return joined.to(x.dtype)
        after = x[..., self.start + self.rotary_dim :]
        return torch.cat([x[..., : self.start], joined.to(x.dtype), after], dim=-1)
