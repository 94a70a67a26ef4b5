"""What patterns write: encodings, the distribution of samples, and bytes that never change."""

import hashlib
import math
import warnings
from statistics import NormalDist

import ml_dtypes
import numpy as np
import pytest

from decodebench import DecodeBenchError, PatternError
from decodebench.dtypes import ENCODINGS, encode
from decodebench.pattern import PHASE_BYTES, TILE_BYTES, Constant, Normal, _log, _normal_quantile
from fill_oracle import MASK, mix, phase_of

DTYPES = sorted(ENCODINGS)


def values(tile, dtype):
    return tile.view(ENCODINGS[dtype]).astype(np.float64)


@pytest.mark.parametrize(
    ("dtype", "pair"),
    [
        ("float32", "0000c03f"),
        ("float16", "003e"),
        ("bfloat16", "c03f"),
        ("float8_e4m3fn", "3c"),
        ("float8_e5m2", "3e"),
    ],
)
def test_constant_is_encoded_and_repeated(dtype, pair):
    tile = Constant(1.5).tile(dtype)
    assert tile.dtype == np.uint8
    assert tile.tobytes() == bytes.fromhex(pair) * (PHASE_BYTES // (len(pair) // 2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sign", [1, -1])
def test_values_beyond_the_finite_range_become_the_largest(dtype, sign):
    largest = sign * float(ml_dtypes.finfo(ENCODINGS[dtype]).max)
    for value in (largest, largest * 1.001, largest * 1e3, sign * 1.7e308):
        assert set(values(Constant(value).tile(dtype), dtype)) == {largest}
    tile = values(Normal(largest, abs(largest)).tile(dtype), dtype)
    assert np.isfinite(tile).all()
    assert 0.4 < (tile == largest).mean() < 0.6
    assert np.isfinite(values(Normal(-1.7e308, 1.7e308).tile(dtype), dtype)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_encoding_rounds_to_the_nearest(dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        codes = np.arange(1 << 8 * min(ENCODINGS[dtype].itemsize, 2), dtype=np.uint32)
        if dtype == "float32":
            codes <<= 16
        stored = codes.astype(f"u{ENCODINGS[dtype].itemsize}").view(ENCODINGS[dtype])
        numbers = stored.astype(np.float64)
    numbers = np.unique(numbers[np.isfinite(numbers)])
    decoded = values(encode(numbers, dtype), dtype)
    np.testing.assert_array_equal(decoded, numbers)
    if dtype != "float32":
        low, high = numbers[:-1], numbers[1:]
        np.testing.assert_array_equal(values(encode(low * 0.75 + high * 0.25, dtype), dtype), low)
        np.testing.assert_array_equal(values(encode(low * 0.25 + high * 0.75, dtype), dtype), high)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, "x", None, 10**400])
def test_what_is_not_a_finite_number_is_refused(bad):
    with pytest.raises(PatternError, match=r"^value must be a finite number, got "):
        Constant(bad)
    with pytest.raises(PatternError, match=r"^mean must be a finite number, got "):
        Normal(bad, 1)
    with pytest.raises(PatternError, match=r"^std must be a finite number, got "):
        Normal(0, bad)


def test_other_bad_parameters_are_refused():
    with pytest.raises(PatternError, match=r"^std must not be negative, got -0\.5$"):
        Normal(0, -0.5)
    for seed in (-1, 1 << 64, 0.5, "x"):
        with pytest.raises(PatternError, match=r"^seed must be an integer in \[0, 2\*\*64\), got"):
            Normal(0, 1, seed)
    assert issubclass(PatternError, DecodeBenchError)
    assert Normal(0, 1, MASK).tile("float16").any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_deviation_is_a_constant(dtype):
    pattern = Normal(0.25, 0.0, seed=3)
    assert pattern.tile(dtype).tobytes() == Constant(0.25).tile(dtype).tobytes()
    assert not pattern.phases(np.arange(3), np.arange(3), PHASE_BYTES).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_samples_are_normal(dtype):
    mean, std = -3.0, 2.0
    tile = Normal(mean, std, seed=7).tile(dtype)
    assert tile.nbytes == TILE_BYTES
    samples = np.sort((values(tile, dtype) - mean) / std)
    size = samples.size
    bits = {"float32": 23, "float16": 10, "bfloat16": 7, "float8_e4m3fn": 3, "float8_e5m2": 2}
    # Rounding moves a value by at most half a unit in its last place, both ways alike.
    blur = 0.02 if bits[dtype] < 4 else 0.0
    assert abs(samples.mean()) < 4 / math.sqrt(size) + blur
    assert abs(samples.std() - 1) < 4 / math.sqrt(2 * size) + blur
    if dtype == "float32":
        exact = NormalDist()
        at = np.arange(0, size, 97)
        cdf = np.array([exact.cdf(x) for x in samples[at]])
        # Kolmogorov-Smirnov: beyond 1.95 once in a thousand.
        assert np.abs(cdf - (at + 0.5) / size).max() * math.sqrt(size) < 1.95
        correlation = np.corrcoef(values(tile, dtype)[:-1], values(tile, dtype)[1:])[0, 1]
        assert abs(correlation) < 4 / math.sqrt(size)


def test_samples_are_those_of_the_documented_formula():
    seed = 12345
    tile = values(Normal(0.0, 1.0, seed).tile("float32"), "float32")
    quantile = NormalDist().inv_cdf
    for index in [*range(2000), tile.size - 1]:
        uniform = ((mix((mix(seed) + index) & MASK) >> 29) + 0.5) / 2**35
        assert tile[index] == pytest.approx(quantile(uniform), rel=1e-7)


def test_quantiles_and_logarithms_are_precise():
    low = np.concatenate([2.0 ** -np.arange(1, 36.5, 0.01), np.arange(0.0751, 0.5, 0.0003)])
    p = np.concatenate([low, 1 - low])
    expected = [NormalDist().inv_cdf(x) for x in p]
    np.testing.assert_allclose(_normal_quantile(p), expected, rtol=2e-15, atol=1e-16)
    np.testing.assert_allclose(_log(p), [math.log(x) for x in p], rtol=1e-15)


def test_no_sample_is_doubled():
    tile = Normal(0.0, 1.0).tile("float32").view(np.uint32)
    assert len(np.unique(tile)) > 0.995 * tile.size
    chunks = tile.reshape(-1, PHASE_BYTES // 4)
    assert len(np.unique(chunks, axis=0)) == len(chunks)


@pytest.mark.parametrize(
    ("dtype", "digest"),
    [
        ("float32", "176788c4e137c046"),
        ("float16", "75843d234205ad9d"),
        ("bfloat16", "3b2bef9dbe8ceb37"),
        ("float8_e4m3fn", "e73926c24ea671a2"),
        ("float8_e5m2", "b40426476971c233"),
    ],
)
def test_bytes_never_change(dtype, digest):
    tile = Normal(0.015, 0.5, seed=42).tile(dtype)
    assert hashlib.sha256(tile.tobytes()).hexdigest()[:16] == digest


def test_seeds_give_other_samples():
    first, second = (Normal(0, 1, seed).tile("float32") for seed in (0, 1))
    assert (first.view(np.uint32) == second.view(np.uint32)).mean() < 1e-3


def test_phases_are_those_of_the_documented_formula():
    keys = np.array([0, 1, -1, 2**31, 2**63 - 1, -(2**63)])
    ordinals = np.array([[0], [1], [500]])
    for seed in (0, 1, MASK):
        for period in (16, 48, TILE_BYTES):
            phases = Normal(0, 1, seed).phases(ordinals, keys, period)
            assert phases.dtype == np.int64
            expected = [
                [phase_of(seed, t, k, period) for k in keys.tolist()]
                for t in ordinals[:, 0].tolist()
            ]
            assert phases.tolist() == expected


def test_phases_spread_evenly():
    phases = Normal(0, 1).phases(np.array([[0], [1]]), np.arange(50_000), TILE_BYTES)
    counts = np.bincount(phases.ravel() // (TILE_BYTES // 64), minlength=64)
    chi_squared = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
    assert chi_squared < 110  # 63 degrees of freedom: once in five thousand
    assert (phases[0] == phases[1]).mean() < 1e-3
