"""Which kernel serves which batch: pins, tuned plans and their file, the rule."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from moe_ops.cuda import plans, prepare
from moe_ops.cuda.plans import Geometry
from moe_ops.experts import Mxfp4Experts, PreparedExperts
from tests.cuda.test_sm90_layout import experts

GPTOSS = Geometry(128, 2880, 2880, 4)
KIND = "NVIDIA H200, 132 multiprocessors"


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    monkeypatch.setenv("MOE_OPS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(plans, "PINS", ())
    plans.forget_tuned()
    yield
    plans.forget_tuned()


def test_the_rule_covers_every_batch_without_a_gap():
    kernels = [plans.plan_for(GPTOSS, tokens, KIND).kernel for tokens in (1, 64, 65, 1024, 2048, 2049, 8192, 32768)]
    assert kernels == ["decode", "decode", "narrow", "narrow", "narrow", "wide", "wide", "wide"]
    for tokens in range(1, 9000, 7):
        plan = plans.plan_for(GPTOSS, tokens, KIND)
        assert plan.kernel in plans.KERNELS and 1 <= plan.chunk <= plans.LADDER[-1]
        assert plans.capacity_of(tokens) >= min(tokens, plans.LADDER[-1])


def test_chunks_respect_the_limits_of_a_launch():
    assert plans.chunk_of(GPTOSS, "decode") == 64
    assert plans.chunk_of(Geometry(128, 2880, 2880, 16), "decode") == 32
    huge = Geometry(256, 16384, 16384, 16)
    assert plans.chunk_of(huge, "wide") * huge.bytes_per_token <= plans.WORKSPACE_BYTES


def test_what_the_grouped_kernels_do_not_serve():
    alone = Geometry(128, 2880, 2880, 4, grouped=False)
    kernels = [plans.plan_for(alone, tokens, KIND).kernel for tokens in (1, 64, 192, 193, 8192, 32768)]
    assert kernels == ["decode", "decode", "decode", "unpacked", "unpacked", "unpacked"]
    assert plans.plan_for(alone, 32768, KIND).chunk >= 32768
    assert not plans.grouped_serves("sm90_v1", torch.float16)
    assert not plans.grouped_serves("sm90_v1_all_scales", torch.bfloat16)
    assert plans.grouped_serves("sm90_v1", torch.bfloat16)


def test_a_pin_that_does_not_serve_leaves_the_rule(monkeypatch):
    monkeypatch.setattr(plans, "PINS", plans.parse_pins("1-8=wide,16=unpacked"))
    alone = Geometry(128, 2880, 2880, 4, grouped=False)
    assert plans.plan_for(alone, 8, KIND) == plans.Plan("decode", 64, "rule")
    assert plans.plan_for(alone, 16, KIND).kernel == plans.plan_for(GPTOSS, 16, KIND).kernel == "unpacked"


def test_layers_too_large_for_a_decode_launch():
    blocks = Geometry(8, 16384, 16384, 8)  # 64 slots of 2048 strips of 128 blocks
    assert blocks.decode_slots == 63 and plans.chunk_of(blocks, "decode") == 7
    for geometry in (Geometry(8, 40000, 64, 2), Geometry(7000, 64, 64, 2), Geometry(8, 32768, 32768, 16)):
        assert not plans.serves(geometry, "decode")
        assert plans.by_rule(geometry, 1) == "narrow"
        assert plans.by_rule(replace(geometry, grouped=False), 1) == "unpacked"


def test_pins():
    pins = plans.parse_pins("1-8=narrow, 9-64@k6=wide, 128=rule ,")
    assert pins == (
        plans.Pin(1, 8, None, "narrow"),
        plans.Pin(9, 64, 6, "wide"),
        plans.Pin(128, 128, None, None),
    )
    for bad in ("8-1=narrow", "0=narrow", "1-8=triton", "1-8", "x=wide", "1-8@6=wide"):
        with pytest.raises(RuntimeError, match=f"MOE_OPS_SM90_PLANS: entry '{bad}' must be"):
            plans.parse_pins(bad)


def test_pins_win_over_tuning_and_the_first_match_wins(monkeypatch):
    plans.store_tuned(KIND, GPTOSS, {4: "wide", 16: "narrow"})
    monkeypatch.setattr(plans, "PINS", plans.parse_pins("1-8=narrow,1-16=wide,16=decode"))
    assert plans.plan_for(GPTOSS, 4, KIND) == plans.Plan("narrow", 8192, "pinned")
    assert plans.plan_for(GPTOSS, 16, KIND).kernel == "wide"
    monkeypatch.setattr(plans, "PINS", ())
    assert plans.plan_for(GPTOSS, 3, KIND).source == "rule"
    assert plans.plan_for(GPTOSS, 4, KIND) == plans.Plan("wide", 8192, "tuned")


def test_a_race_is_run_once_and_kept(tmp_path):
    calls = []

    def measure(kernel, tokens):
        calls.append((kernel, tokens))
        return {"decode": 3.0, "narrow": 1.0, "wide": 2.0}[kernel]

    assert plans.race(GPTOSS, KIND, [64, 1024], measure) == {64: "narrow", 1024: "narrow"}
    assert calls == [("decode", 64), ("narrow", 64), ("wide", 64), ("narrow", 1024), ("wide", 1024)]
    plans.forget_tuned()
    # Kept for what it was measured for, and no other rows.
    assert plans.plan_for(replace(GPTOSS, grouped=False), 64, KIND).source == "rule"
    assert plans.race(GPTOSS, KIND, [64, 1024], measure) == {64: "narrow", 1024: "narrow"}
    assert len(calls) == 5
    assert plans.plan_for(GPTOSS, 60, KIND) == plans.Plan("narrow", 8192, "tuned")
    # Another card, another geometry: other plans.
    assert plans.plan_for(GPTOSS, 60, "another card").kernel == "decode"
    assert plans.plan_for(Geometry(64, 2880, 2880, 4), 60, KIND).kernel == "decode"
    content = json.loads((tmp_path / "sm90_plans.json").read_text())
    (key,) = content
    for part in (KIND, "hidden_size 2880", f"torch {torch.__version__}", "moe_ops "):
        assert part in key


def test_cache_only_mode_measures_nothing(monkeypatch):
    monkeypatch.setenv("MOE_OPS_SM90_TUNE", "cache")
    with pytest.warns(UserWarning, match=r"no tuned plan for \[64\] tokens: by rule"):
        assert plans.race(GPTOSS, KIND, [64], lambda kernel, tokens: pytest.fail("measured")) == {}


def test_a_broken_file_counts_as_none(tmp_path):
    (tmp_path / "sm90_plans.json").write_text("{")
    assert plans.load_tuned(KIND, GPTOSS) == {}
    plans.store_tuned(KIND, GPTOSS, {8: "narrow"})
    plans.forget_tuned()
    assert plans.load_tuned(KIND, GPTOSS) == {8: "narrow"}


def test_a_folder_that_cannot_be_written_is_one_warning(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MOE_OPS_CACHE_DIR", str(tmp_path / "file" / "below"))
    with pytest.warns(UserWarning, match="tuned plans are not kept"):
        plans.store_tuned(KIND, GPTOSS, {8: "narrow"})
    assert plans.plan_for(GPTOSS, 8, KIND).kernel == "narrow"


def test_entries_of_a_file_that_are_no_plans_are_passed_over(tmp_path):
    key = plans.cache_key(KIND, GPTOSS)
    entry = {"8": "narrow", "x": "narrow", "16": "fast", "24": ["wide"]}
    (tmp_path / "sm90_plans.json").write_text(json.dumps({key: entry, "other": 3}))
    assert plans.load_tuned(KIND, GPTOSS) == {8: "narrow"}
    (tmp_path / "sm90_plans.json").write_text(json.dumps({key: 3}))
    assert plans.load_tuned(KIND, GPTOSS) == {}
    plans.store_tuned(KIND, GPTOSS, {8: "wide"})
    assert plans.load_tuned(KIND, GPTOSS) == {8: "wide"}


def test_pins_that_hold_no_capacity_are_named_in_one_warning():
    unused = "no batch is planned by 9-9=narrow, 8193-20000=rule: capacities are 1, 2"
    with pytest.warns(UserWarning, match=unused) as caught:
        assert len(plans.pins_from("9=narrow,8=decode,8193-20000=rule")) == 3
    assert len(caught) == 1


def test_warm_up_takes_tuned_plans_and_runs_the_sizes_that_it_is_told(monkeypatch):
    import moe_ops
    from moe_ops.cuda import tuning

    calls = []

    def record(x, ids, weights, **options):
        assert (ids == -1).all() and options["activation"] == "swiglu_oai"
        calls.append((len(x), x.dtype))

    monkeypatch.setattr(moe_ops, "fused_mxfp4_moe", record)
    monkeypatch.setattr(plans, "device_kind", lambda device: KIND)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    arguments = Mxfp4Experts(*experts(), w13_layout="gate_up").prepare("sm90_v1").arguments()
    geometry = tuning.geometry_of(arguments, 2)
    plans.store_tuned(KIND, geometry, {24: "wide"})
    plans.forget_tuned()
    tuning.warm_up(arguments, 2, token_counts=(17, 3, 17), activation="swiglu_oai")
    assert calls == [(3, torch.bfloat16), (17, torch.bfloat16)]
    assert plans.plan_for(geometry, 17, KIND).source == "tuned"


def test_report_names_every_capacity():
    rows = plans.report(GPTOSS, KIND)
    assert [row["tokens"] for row in rows] == list(plans.LADDER)
    assert rows[0] == {"tokens": 1, "kernel": "decode", "chunk": 64, "source": "rule"}
    plans.store_tuned(KIND, GPTOSS, {8: "narrow"})
    assert plans.report_text(GPTOSS, KIND).split("\n") == [
        "128 experts, 2880 x 2880, top 4",
        "    <= 7 tokens  decode    at most 64 at a time  (rule)",
        "    <= 8 tokens  narrow    at most 8192 at a time  (tuned)",
        "   <= 64 tokens  decode    at most 64 at a time  (rule)",
        " <= 2048 tokens  narrow    at most 8192 at a time  (rule)",
        "     any tokens  wide      at most 8192 at a time  (rule)",
    ]


def test_experts_go_through_the_layout_and_a_file(tmp_path):
    raw = Mxfp4Experts(*experts(), w13_layout="interleaved")
    prepared = raw.prepare("sm90_v1")
    assert prepared.weight_layout == "sm90_v1" and (prepared.num_experts, prepared.intermediate_size) == (3, 64)
    again = Mxfp4Experts(raw.w13, raw.w13_scale, raw.w2, raw.w2_scale, w13_layout="interleaved")
    for used in (raw, again):
        for layout in ("sm90_v1", "x86_v1"):
            with pytest.raises(RuntimeError, match="have been prepared"):
                used.prepare(layout)
    assert prepared.nbytes == sum(tensor.nbytes for tensor in (raw.w13, raw.w13_scale, raw.w2, raw.w2_scale))
    for name, tensor in zip(("w13", "w13_scale", "w2", "w2_scale"), experts(), strict=True):
        assert all(torch.equal(prepared.checkpoint_expert(expert)[name], tensor[expert]) for expert in range(3))
    prepared.save(tmp_path / "layer.safetensors")
    loaded = PreparedExperts.load(tmp_path / "layer.safetensors").to("cpu")
    for name, value in prepared.arguments().items():
        same = torch.equal(loaded.arguments()[name], value) if isinstance(value, torch.Tensor) else True
        assert same and (value is None) == (loaded.arguments()[name] is None), name


def test_biases_are_widened_once():
    bias = torch.randn(3, 128).to(torch.bfloat16)
    prepared = Mxfp4Experts(*experts(), w13_layout="gate_up", w13_bias=bias).prepare("sm90_v1")
    assert prepared.w2_bias is None and prepared.w13_bias.dtype == torch.float32
    assert torch.equal(prepared.w13_bias, bias.float())


def test_where_the_kernels_do_not_apply_the_experts_stay_and_one_line_says_why():
    raw = Mxfp4Experts(*experts(), w13_layout="gate_up")
    with pytest.warns(UserWarning, match="the portable kernel serves these experts: ") as caught:
        assert prepare(raw) is raw
    assert raw.arguments()["w13"] is raw.w13
    assert len(caught) == 1 and "\n" not in str(caught[0].message)
