"""The parts of the demo; the whole of it on the real model is a heavy test."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import moe_ops
from moe_ops._cli import smollm2

ROOT = Path(moe_ops.__file__).resolve().parents[1]


class Tokenizer:
    """Tokens are bytes of UTF-8."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return bytes(ids).decode(errors="replace")


def test_stream_writes_whole_characters_as_they_come() -> None:
    pieces: list[str] = []
    stream = smollm2.Stream(Tokenizer(), pieces.append)
    stream.put(torch.tensor([[9, 9]]))  # the prompt is not text
    for byte in "ae\u0301\u20acb".encode():
        stream.put(torch.tensor([byte]))
    assert [piece for piece in pieces if piece] == ["a", "e", "\u0301", "\u20ac", "b"]
    assert len(stream.ids) == len(stream.times) == 8


def test_speed_leaves_the_first_token_out() -> None:
    stream = smollm2.Stream(Tokenizer(), None)
    stream.times = [0.0, 1.0, 1.5, 2.0]
    assert stream.tokens_per_second == 1.5


def test_texts_ship_with_the_package() -> None:
    assert 150 < len(smollm2.text("evaluation").split()) < 400
    assert len(smollm2.text("calibration").split()) > 800
    assert not set(smollm2.text("evaluation").split("\n")) & set(smollm2.text("calibration").split("\n")) - {""}


def test_perplexity_of_a_model_that_knows_nothing() -> None:
    class Uniform:
        def __call__(self, ids: torch.Tensor, use_cache: bool) -> object:
            return type("Output", (), {"logits": torch.zeros(1, ids.shape[1], 50)})

    assert smollm2.perplexity(Uniform(), torch.arange(10)[None]) == pytest.approx(50)


@pytest.mark.heavy
def test_whole_demo() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    try:
        smollm2.find_gguf()
    except RuntimeError as error:
        pytest.skip(str(error))
    done = subprocess.run(
        [sys.executable, "-m", "moe_ops", "demo", "--max-new-tokens", "24", "--device", "cpu"],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"(dense|\d) ?(?:of 8)?, \w+\s*\W\s*([\d.]+)", done.stdout)
    perplexity = {name: float(value) for name, value in rows}
    assert set(perplexity) == {"dense", "8", "7", "6", "5", "4"}
    assert perplexity["dense"] < perplexity["8"] < 1.35 * perplexity["dense"]
    assert perplexity["8"] < perplexity["6"] < 2 * perplexity["dense"]
    assert perplexity["6"] < perplexity["4"] < 5 * perplexity["dense"]
