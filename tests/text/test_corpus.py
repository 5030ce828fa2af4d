import unicodedata

import pytest
import torch

from kvprobe.errors import KvprobeError
from kvprobe.text.corpus import LETTERS, Corpus, characters, spelled, tokens
from kvprobe.text.texts import Text, read_text

ABC = Text("abc.txt", "f00d", "a b c d e f g h i j")  # 19 characters, all in the vocabulary


def small(**split):
    return characters(ABC, **({"length": 4, "n_train": 10, "n_valid": 5} | split))


def said(windows):
    return ["".join(LETTERS[i] for i in window) for window in windows]


def test_the_vocabulary_is_the_published_28_symbols_with_the_unknown():
    assert len(LETTERS) == len(set(LETTERS)) == 28
    assert set("abcdefghijklmnopqrstuvwxyz ") < set(LETTERS)


def test_every_run_of_what_is_no_letter_is_one_space_and_the_rest_lower_case():
    text = Text("t", "", "It's 5 o'clock\n\n-- NOW, at last; caf\u00e9 " + "and so on and so on and on and on " * 4)
    corpus = characters(text, length=1, n_train=1, n_valid=1)
    assert said([corpus.ids])[0].startswith("it s o clock now at last caf and so on")


def test_windows_start_at_every_id_and_validation_follows_training():
    corpus = small()
    assert said(corpus.windows(torch.tensor([0, 1]))) == ["a b c", " b c "]
    assert said(corpus.valid_windows()) == ["f g h", " g h ", "g h i", " h i ", "h i j"]
    assert corpus.valid_windows().shape == (5, 5)


def test_a_text_one_character_short_is_refused_with_both_numbers():
    assert len(small(n_valid=5).ids) == 19
    with pytest.raises(KvprobeError, match=r"abc.txt is too small: train_windows 10 and valid_windows 6, .* need 20 "):
        small(n_valid=6)


@pytest.mark.parametrize("name", ["length", "n_train", "n_valid"])
def test_sizes_below_one_are_refused_by_name(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        small(**{name: 0})


def test_an_epoch_reads_every_window_once_and_the_next_in_another_order():
    corpus = small()
    epochs = [[corpus.train_batch(step, batch=5, seed=3) for step in steps] for steps in ((0, 1), (2, 3))]
    read = [said(torch.cat(epoch)) for epoch in epochs]
    assert sorted(read[0]) == sorted(read[1]) == sorted(said(corpus.windows(torch.arange(10))))
    assert read[0] != read[1]


def test_no_epoch_of_one_seed_is_one_of_another():
    corpus = Corpus("ids", "", "ids", 64, torch.arange(64), length=1, n_train=60, n_valid=1)
    epochs = {(seed, epoch): corpus.train_batch(epoch, batch=60, seed=seed) for seed in range(4) for epoch in range(40)}
    orders = {tuple(windows[:, 0].tolist()) for windows in epochs.values()}
    assert len(orders) == len(epochs)


def test_a_few_letters_of_another_alphabet_are_spaces_and_more_are_refused():
    few, many = ("a" * (100 - n) + "\u03b1" * n + " " for n in (1, 2))
    assert said([characters(Text("t", "", few), length=1, n_train=1, n_valid=1).ids]) == ["a" * 99 + " "]
    with pytest.raises(KvprobeError, match="misses 2% of the letters of t"):
        characters(Text("t", "", many), length=1, n_train=1, n_valid=1)


def test_accents_that_are_characters_of_their_own_are_no_spaces_inside_words():
    text = Text("t", "", unicodedata.normalize("NFD", "la for\u00eat \u00e9tait l\u00e0"))
    with pytest.raises(KvprobeError, match="the letters of t"):
        characters(text, length=1, n_train=1, n_valid=1)


def test_an_incomplete_batch_is_left_out():
    corpus = small()
    first, second = corpus.train_batch(2, batch=3, seed=0), corpus.train_batch(3, batch=3, seed=0)
    assert len(first) == len(second) == 3
    assert not torch.equal(corpus.train_batch(0, batch=3, seed=0), second)


def test_a_batch_is_a_function_of_seed_and_step_alone():
    corpus = small()
    torch.manual_seed(1)
    first = corpus.train_batch(7, batch=5, seed=2)
    torch.manual_seed(2)
    torch.testing.assert_close(small().train_batch(7, batch=5, seed=2), first, rtol=0, atol=0)
    assert not torch.equal(corpus.train_batch(7, batch=5, seed=1), first)
    with pytest.raises(ValueError, match="a batch of 11 is larger than the 10 training windows"):
        corpus.train_batch(0, batch=11, seed=0)


def test_a_text_of_another_alphabet_is_refused_with_some_of_its_letters():
    text = Text("wells.txt", "", "\u041c\u0430\u0448\u0438\u043d\u0430 \u0432\u0440\u0435\u043c\u0435\u043d\u0438")
    with pytest.raises(KvprobeError, match=r"28 symbols misses 100% of the letters of wells.txt \(such as '\u041c'"):
        characters(text, length=1, n_train=1, n_valid=1)


def test_a_text_without_letters_is_called_so_and_not_too_short():
    with pytest.raises(KvprobeError, match=r"numbers\.txt has no letters"):
        characters(Text("numbers.txt", "", "1234 5678 " * 1000), length=1, n_train=1, n_valid=1)


def test_no_character_becomes_the_unknown_silently():
    with pytest.raises(KvprobeError, match=r"vocabulary of 3 symbols misses 2 characters of abc.txt: 'c', 'z'$"):
        spelled(ABC, "abcz", vocabulary=("?", "a", "b"), length=1, n_train=1, n_valid=1)


def test_a_tokenizers_ids_and_its_whole_vocabulary(gpt2_tokenizer_files):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gpt2_tokenizer_files)
    corpus = tokens(Text("t", "cafe", "The Time Traveller, for so"), tokenizer, length=2, n_train=2, n_valid=1)
    assert tokenizer.decode(corpus.ids) == "The Time Traveller, for so"
    assert (corpus.kind, corpus.vocab) == ("tokens", 50257)
    assert corpus.record()["corpus_sha256"] == "cafe"


def test_an_id_beyond_the_vocabulary_is_refused():
    with pytest.raises(KvprobeError, match="t has the id 9, but the vocabulary only 9 ids"):
        Corpus("t", "", "ids", 9, torch.arange(10), length=2, n_train=2, n_valid=2)


def test_the_published_split_fits_the_bundled_novel_without_a_network(tmp_path, monkeypatch):
    monkeypatch.setenv("KVPROBE_HOME", str(tmp_path / "empty"))
    corpus = characters(read_text("time-machine"))
    assert said([corpus.ids[:44]]) == ["the time machine by h g wells i the time tra"]
    # a window of 128 and the next one starts at every id
    assert corpus.valid_windows().shape == (3_000, 129)
    assert len(corpus.ids) >= 100_000 + 3_000 + 128
    assert not (tmp_path / "empty").exists()
