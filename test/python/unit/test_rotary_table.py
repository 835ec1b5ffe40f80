"""Tables of cos and sin against the published formulas, written out here once more in fp64."""

import math

import numpy as np
import pytest
import torch

from cuteforge import ContractError, UnsupportedError
from cuteforge.families.rotary import table
from cuteforge.families.rotary.scaling import LinearScaling, Llama3Scaling, NTKScaling, YarnScaling
from cuteforge.families.rotary.table import rotary_frequencies, rotary_table

# As published with the models; `rope_theta` and the rotated width beside it.
LLAMA_3_1 = (
    128,
    500000.0,
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
)
LLAMA_3_2_1B = (64, 500000.0, {**LLAMA_3_1[2], "factor": 32.0})
QWEN_2_5 = (128, 1000000.0, {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768})
DEEPSEEK_V3 = (
    64,
    10000.0,
    {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
)
GPT_OSS = (
    64,
    150000.0,
    {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
)
# Positions beyond what bf16 (256), fp16 (2048) and their neighbours can tell apart.
RO_3_POSITIONS = (257, 1857, 4095, 15962, 65537, 1000003)


def plain(rotary_dim, base):
    return [1.0 / math.exp(math.log(base) * 2 * i / rotary_dim) for i in range(rotary_dim // 2)]


def llama3(rotary_dim, base, factor, low, high, context):
    """By wavelength: kept below context/high, divided above context/low, blended between."""
    scaled = []
    for frequency in plain(rotary_dim, base):
        wavelength = 2 * math.pi / frequency
        if wavelength < context / high:
            scaled.append(frequency)
        elif wavelength > context / low:
            scaled.append(frequency / factor)
        else:
            smooth = (context / wavelength - low) / (high - low)
            scaled.append((1 - smooth) * frequency / factor + smooth * frequency)
    return scaled


def yarn(rotary_dim, base, factor, context, fast, slow, truncate):
    """Extrapolation and interpolation, blended by a ramp over the number of the pair."""

    def pair_with(turns):
        return rotary_dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair_with(fast), pair_with(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    scaled = []
    for i, frequency in enumerate(plain(rotary_dim, base)):
        extrapolated = 1 - min(max((i - low) / (high - low), 0), 1)
        scaled.append(frequency / factor * (1 - extrapolated) + frequency * extrapolated)
    return scaled


def check_frequencies(got, want, amplitude=1.0):
    frequencies, factor = got
    assert frequencies == pytest.approx(want, rel=1e-13)
    assert factor == pytest.approx(amplitude, rel=1e-13)


@pytest.mark.parametrize("rotary_dim", [2, 4, 64, 80, 128, 256])
@pytest.mark.parametrize("base", [10000, 10000.0, 1e6, 2.5])
@pytest.mark.parametrize("scaling", [None, {"rope_type": "default"}, {"type": "default"}])
def test_plain_frequencies(rotary_dim, base, scaling):
    check_frequencies(rotary_frequencies(rotary_dim, base, scaling), plain(rotary_dim, base))


@pytest.mark.parametrize("factor", [1, 2.5, 8.0])
def test_linear_stretches_positions(factor):
    """Position 4*factor of the scaled table is position 4 of the plain one."""
    check_frequencies(rotary_frequencies(64, 1e4, LinearScaling(factor)), [f / factor for f in plain(64, 1e4)])


@pytest.mark.parametrize("factor", [1, 2.5, 8.0])
@pytest.mark.parametrize("rotary_dim", [4, 64, 128])
def test_ntk_is_another_base(rotary_dim, factor):
    base = 1e4 * factor ** (rotary_dim / (rotary_dim - 2))
    got = rotary_frequencies(rotary_dim, 1e4, NTKScaling(factor))
    check_frequencies(got, plain(rotary_dim, base))
    assert got[0][0] == 1
    assert got[0][-1] == pytest.approx(plain(rotary_dim, 1e4)[-1] / factor)


def test_ntk_of_a_single_pair_changes_nothing():
    """The exponent rotary_dim / (rotary_dim - 2) has no value there; the only frequency is 1 with any base."""
    check_frequencies(rotary_frequencies(2, 1e4, NTKScaling(8.0)), [1.0])


@pytest.mark.parametrize(("rotary_dim", "base", "config"), [LLAMA_3_1, LLAMA_3_2_1B], ids=["3.1", "3.2-1B"])
def test_llama3_as_published(rotary_dim, base, config):
    want = llama3(rotary_dim, base, config["factor"], 1.0, 4.0, 8192)
    check_frequencies(rotary_frequencies(rotary_dim, base, config), want)
    kept = [a == b for a, b in zip(want, plain(rotary_dim, base))]
    assert kept[0] and not kept[-1], "the config shows neither branch"


@pytest.mark.parametrize(
    ("case", "amplitude"),
    [(QWEN_2_5, 0.1 * math.log(4) + 1), (DEEPSEEK_V3, 1.0), (GPT_OSS, 0.1 * math.log(32) + 1)],
    ids=["Qwen2.5", "DeepSeek-V3", "gpt-oss"],
)
def test_yarn_as_published(case, amplitude):
    rotary_dim, base, config = case
    context, truncate = config["original_max_position_embeddings"], config.get("truncate", True)
    want = yarn(rotary_dim, base, config["factor"], context, 32, 1, truncate)
    check_frequencies(rotary_frequencies(rotary_dim, base, config), want, amplitude)


def test_yarn_keeps_fast_pairs_and_interpolates_slow_ones():
    frequencies, _ = rotary_frequencies(*QWEN_2_5)
    assert frequencies[0] == plain(128, 1e6)[0]
    assert frequencies[-1] == pytest.approx(plain(128, 1e6)[-1] / 4)


@pytest.mark.parametrize(
    ("options", "amplitude"),
    [
        ({}, 0.1 * math.log(40) + 1),
        ({"attention_factor": 1.25}, 1.25),
        ({"mscale": 0.707, "mscale_all_dim": 0.707}, 1.0),
        ({"mscale": 0.707, "mscale_all_dim": 0.5}, (0.0707 * math.log(40) + 1) / (0.05 * math.log(40) + 1)),
        ({"mscale": 0.707}, 0.1 * math.log(40) + 1),
        ({"mscale": 0.707, "mscale_all_dim": 0}, 0.1 * math.log(40) + 1),
    ],
)
def test_yarn_amplitude_is_in_cos_and_sin(options, amplitude):
    cos, sin = rotary_table(5, 64, scaling=YarnScaling(40.0, 4096, **options))
    radius = (cos.double().square() + sin.double().square()).sqrt()
    torch.testing.assert_close(radius, torch.full_like(radius, amplitude), rtol=1e-6, atol=0)


def test_yarn_limits_on_one_pair_are_a_step():
    """A context so short that both limits are clamped to pair 0."""
    frequencies, _ = rotary_frequencies(8, 1e4, YarnScaling(2.0, 6, truncate=False, beta_fast=1.5))
    assert frequencies == pytest.approx([plain(8, 1e4)[0], *(f / 2 for f in plain(8, 1e4)[1:])])


def test_angles_are_fp64_at_any_position():
    """Each entry is the fp64 value rounded once to fp32."""
    cos, sin = rotary_table(max(RO_3_POSITIONS) + 1, 8)
    for position in RO_3_POSITIONS:
        for i, frequency in enumerate(plain(8, 1e4)):
            want = torch.tensor([math.cos(position * frequency), math.sin(position * frequency)])
            torch.testing.assert_close(torch.stack((cos[position, i], sin[position, i])), want, rtol=1e-6, atol=1e-7)
    assert cos[4095, 0].item() == pytest.approx(-0.066, abs=1e-3)


@pytest.mark.parametrize("max_pos", [0, 1, 7, 8, 9, 100])
def test_chunks_join(max_pos, monkeypatch):
    """Positions are counted on from chunk to chunk; the last one may be short."""
    whole = rotary_table(max_pos, 6)
    monkeypatch.setattr(table, "_CHUNK_ELEMENTS", 3 * 8)
    for got, want in zip(rotary_table(max_pos, 6), whole, strict=True):
        assert got.shape == (max_pos, 3)
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_default_dtype_and_autocast_change_nothing():
    want = rotary_table(300, 64)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            got = rotary_table(300, 64)
    finally:
        torch.set_default_dtype(before)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == torch.float32
        assert torch.equal(a, b)


def test_device_is_where_asked():
    cos, sin = rotary_table(1 << 20, 64, device="meta")
    assert cos.is_meta and sin.is_meta and cos.shape == (1 << 20, 32)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("max_pos", {"max_pos": -1}),
        ("max_pos", {"max_pos": 8.0}),
        ("max_pos", {"max_pos": True}),
        ("rotary_dim", {"rotary_dim": 0}),
        ("rotary_dim", {"rotary_dim": 7}),
        ("rotary_dim", {"rotary_dim": "64"}),
        ("base", {"base": 1.0}),
        ("base", {"base": 0.0}),
        ("base", {"base": math.inf}),
        ("base", {"base": math.nan}),
        ("base", {"base": "10000"}),
        ("base", {"base": 10**400}),
        ("max_pos", {"max_pos": 2**63}),
        ("rotary_dim", {"rotary_dim": 2**63}),
        ("scaling", {"scaling": 4.0}),
        ("scaling", {"scaling": "yarn"}),
        (r"scaling\.rope_type", {"scaling": {}}),
        (r"scaling\.rope_type", {"scaling": {"factor": 2.0}}),
        (r"scaling\.rope_type", {"scaling": {"rope_type": "rotate", "factor": 2.0}}),
        (r"scaling\.full_attention", {"scaling": {"full_attention": {"rope_type": "default"}}}),
        (r"scaling\.rope_theta", {"scaling": {"rope_type": "default", "rope_theta": "1e6"}}),
        (
            r"scaling\.factor",
            {"scaling": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 4096}},
        ),
        (r"scaling\.llama_4_scaling_beta", {"scaling": {"rope_type": "default", "llama_4_scaling_beta": 0.1}}),
        (r"scaling\.1", {"scaling": {"rope_type": "default", 1: 2}}),
        ("base", {"base": 1e4, "scaling": {"rope_type": "default", "rope_theta": 1e6}}),
        (r"scaling\.rope_type", {"scaling": {"rope_type": ["ntk"], "factor": 2.0}}),
        (r"scaling\.type", {"scaling": {"rope_type": "ntk", "type": "linear", "factor": 2.0}}),
        (r"scaling\.factor", {"scaling": {"rope_type": "linear"}}),
        (r"scaling\.factor", {"scaling": {"rope_type": "default", "factor": 2.0}}),
        (r"scaling\.factor", {"scaling": {"rope_type": "linear", "factor": 0.5}}),
        (r"scaling\.factor", {"scaling": {"rope_type": "ntk", "factor": "2"}}),
        (r"scaling\.original_max_position_embeddings", {"scaling": {"rope_type": "yarn", "factor": 2.0}}),
    ],
)
def test_bad_argument_is_refused_by_name(name, arguments):
    with pytest.raises(ContractError, match=rf"^{name}: wanted .*, got "):
        rotary_table(**{"max_pos": 8, "rotary_dim": 64, **arguments})


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("factor", lambda: LinearScaling(math.nan)),
        ("factor", lambda: NTKScaling(0.0)),
        ("high_freq_factor", lambda: Llama3Scaling(8.0, 4.0, 4.0, 8192)),
        ("low_freq_factor", lambda: Llama3Scaling(8.0, -1.0, 4.0, 8192)),
        ("original_max_position_embeddings", lambda: Llama3Scaling(8.0, 1.0, 4.0, 8192.5)),
        ("original_max_position_embeddings", lambda: YarnScaling(4.0, 0)),
        ("beta_slow", lambda: YarnScaling(4.0, 4096, beta_slow=0)),
        ("beta_fast", lambda: YarnScaling(4.0, 4096, beta_fast=1)),
        ("attention_factor", lambda: YarnScaling(4.0, 4096, attention_factor=-1.0)),
        ("mscale", lambda: YarnScaling(4.0, 4096, mscale=True)),
        ("truncate", lambda: YarnScaling(4.0, 4096, truncate=1)),
    ],
)
def test_bad_scaling_is_refused_by_name(name, make):
    with pytest.raises(ContractError, match=rf"^scaling\.{name}: wanted .*, got "):
        make()


# transformers' dictionaries, as they are.


@pytest.mark.parametrize(
    "kind",
    ["dynamic", "longrope", "proportional", "axial"],
)
def test_types_of_transformers_that_are_not_served_are_refused_by_name(kind):
    with pytest.raises(UnsupportedError, match=rf"^scaling\.rope_type: .*'{kind}'"):
        rotary_table(8, 64, scaling={"rope_type": kind, "rope_theta": 1e4, "factor": 2.0})


def test_rope_theta_is_the_base():
    config = {"rope_type": "default", "rope_theta": 1e6}
    assert rotary_frequencies(64, scaling=config) == rotary_frequencies(64, 1e6)
    assert rotary_frequencies(64, 1e6, config) == rotary_frequencies(64, 1e6)
    assert rotary_frequencies(64, None, None) == rotary_frequencies(64, 1e4)


@pytest.mark.parametrize(
    "more",
    [
        {"partial_rotary_factor": 0.5},
        {"mrope_section": [16, 24, 24], "mrope_interleaved": True},
        {"max_position_embeddings": 131072},
        {"type": "linear"},
    ],
)
def test_keys_that_say_nothing_about_frequencies_change_nothing(more):
    config = {"rope_type": "linear", "factor": 4.0}
    assert rotary_frequencies(64, scaling={**config, **more}) == rotary_frequencies(64, scaling=config)


def test_multimodal_tables_are_plain_ones():
    """Which axis's position a pair turns by is up to who reads the table."""
    config = {"type": "mrope", "mrope_section": [16, 24, 24]}
    assert rotary_frequencies(128, scaling=config) == rotary_frequencies(128)


def test_options_of_none_are_not_given():
    given = dict.fromkeys(("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"))
    rotary_dim, base, config = QWEN_2_5
    assert rotary_frequencies(rotary_dim, base, {**config, **given}) == rotary_frequencies(*QWEN_2_5)


def test_numbers_of_numpy_count():
    config = {"rope_type": "yarn", "factor": np.float32(4), "original_max_position_embeddings": np.int64(32768)}
    want = rotary_frequencies(*QWEN_2_5)
    assert rotary_frequencies(np.int32(128), np.float64(1e6), config) == want


@pytest.mark.parametrize(
    "scaling",
    [
        YarnScaling(3e38, 1, beta_slow=5e-324),
        YarnScaling(2.0, 2**62, beta_fast=3e38, beta_slow=3e37),
        YarnScaling(2.0, 1, beta_fast=1e-300, beta_slow=5e-324),
        Llama3Scaling(3e38, 0.0, 3e38, 2**62),
        NTKScaling(3e38),
    ],
    ids=str,
)
@pytest.mark.parametrize("base", [1 + 2**-52, 3e38])
def test_extreme_numbers_give_finite_frequencies(scaling, base):
    frequencies, amplitude = rotary_frequencies(64, base, scaling)
    assert all(map(math.isfinite, (*frequencies, amplitude)))


def configs_of_transformers():
    pytest.importorskip("transformers")
    from transformers import GptOssConfig, LlamaConfig, Qwen3Config

    linear = {"type": "linear", "factor": 2.5}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    deepseek = {
        **yarn,
        "type": "yarn",
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 0.707,
        "beta_fast": 32,
        "beta_slow": 1,
    }
    llama, qwen = {"head_dim": 128}, {"head_dim": 128, "rope_theta": 1e6}
    return {
        "Llama 3.1": LlamaConfig(**llama, rope_theta=5e5, rope_scaling=LLAMA_3_1[2]),
        "Llama 3.2": LlamaConfig(head_dim=64, rope_theta=5e5, rope_scaling=LLAMA_3_2_1B[2]),
        "Llama, linear": LlamaConfig(**llama, rope_scaling=linear),
        "Llama, partial": LlamaConfig(**llama, partial_rotary_factor=0.5, rope_scaling=linear),
        "Qwen3": Qwen3Config(**qwen),
        "Qwen3, yarn": Qwen3Config(**qwen, rope_scaling=dict(yarn)),
        "Qwen3, yarn of DeepSeek": Qwen3Config(**qwen, rope_scaling=deepseek),
        "Qwen3, yarn with its factor": Qwen3Config(**qwen, rope_scaling={**yarn, "attention_factor": 1.25}),
        "gpt-oss": GptOssConfig(),
    }  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        "Llama 3.1",
        "Llama 3.2",
        "Llama, linear",
        "Llama, partial",
        "Qwen3",
        "Qwen3, yarn",
        "Qwen3, yarn of DeepSeek",
        "Qwen3, yarn with its factor",
        "gpt-oss",
    ],
)
def test_tables_equal_those_of_transformers(name):
    """The dictionary of a config, unchanged; frequencies are fp32 there."""
    config = configs_of_transformers()[name]
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = config.rope_scaling
    assert scaling is config.rope_parameters and "rope_theta" in scaling
    rotary_dim = int(config.head_dim * scaling.get("partial_rotary_factor", 1.0))
    if scaling["rope_type"] == "default":
        wanted, amplitude = torch.tensor(plain(rotary_dim, scaling["rope_theta"])), 1.0
    else:
        wanted, amplitude = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, "cpu")
    frequencies, got = rotary_frequencies(rotary_dim, scaling=scaling)
    torch.testing.assert_close(torch.tensor(frequencies, dtype=torch.float32), wanted.float(), rtol=1e-6, atol=0)
    assert got == pytest.approx(amplitude, rel=1e-12)
    cos, sin = rotary_table(64, rotary_dim, scaling=scaling)
    angles = torch.arange(64.0)[:, None] * wanted.float()
    torch.testing.assert_close(cos, angles.cos() * amplitude, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sin, angles.sin() * amplitude, rtol=1e-5, atol=1e-5)
