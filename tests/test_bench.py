"""The benchmarks: peers are lossless, bounds exact, inputs fair, and a small run shows what it must."""

from __future__ import annotations

import importlib.util
import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import deltaformat as df
import peers
from deltaformat.bench import bounds, codecs, coding, inputs, memory, rebase, shapes, stores
from deltaformat.bench import run as bench_run
from deltaformat.bench.codecs import MODES, Absent, Blocks, bits, changes, same_bits, size_of
from deltaformat.bench.synthetic import SyntheticTraining
from deltaformat.cli import bench as bench_command
from deltaformat.cli import main

BF16 = ml_dtypes.bfloat16
SPECIAL = {
    1: [0x00, 0x80, 0x7F, 0xFF],
    2: [0x0000, 0x8000, 0x7F80, 0x7FC1, 0xFFFF, 0x7C01],  # zeros, infinity, NaNs with payloads
    4: [0, 0x80000000, 0x7FC00001, 0xFFFFFFFF],
    8: [0, 1 << 63, 0x7FF8000000000001, (1 << 64) - 1],
}
PEERS = [name for name in peers.FACTORIES if name != "moonclip"]  # which writes and syncs files: it is slow


def silent(_):
    pass


@st.composite
def steps(draw):
    """Two states of the same names and shapes, of all widths; few or all elements differ."""
    seed = draw(st.integers(0, 2**32))
    rng = np.random.default_rng(seed)
    old, new = {}, {}
    for number in range(draw(st.integers(0, 4))):
        width = draw(st.sampled_from([1, 2, 4, 8]))
        shape = tuple(draw(st.lists(st.integers(0, 300 if number % 2 else 9), max_size=3)))[:3]
        shape = shape if math.prod(shape) <= 100_000 else shape[:1]
        before = np.frombuffer(rng.bytes(math.prod(shape) * width), f"u{width}").reshape(shape).copy()
        after = before.copy()
        chance = draw(st.sampled_from([0.0, 0.001, 0.1, 1.0]))
        flat = after.reshape(-1)
        places = np.flatnonzero(rng.random(flat.size) < chance)
        flat[places] = rng.choice(np.array(SPECIAL[width], f"u{width}"), places.size)
        old[f"t.{number}"], new[f"t.{number}"] = before, after
    return old, new


def round_trip(codec, old, new):
    kept = {name: array.copy() for name, array in old.items()}
    codec.prepare(old)
    payload = codec.encode(old, new)
    target = {name: array.copy() for name, array in old.items()}
    codec.apply(payload, target)
    assert same_bits(target, new)
    assert same_bits(old, kept)
    return payload


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", PEERS)
def test_peers_are_lossless(name, threads):
    if name == "torch.save":
        pytest.importorskip("torch", reason="torch.save needs torch")
    codec = peers.FACTORIES[name](threads)

    @given(steps())
    def check(step):
        round_trip(codec, *step)  # the same coder for all: nothing stays in its buffers

    check()
    codec.close()


def test_moonclip_is_lossless():
    pytest.importorskip("moonclip", reason="not installed")
    codec = peers.FACTORIES["moonclip"](1)

    @given(steps().filter(lambda step: step[0]))
    @settings(max_examples=5)
    def check(step):
        assert size_of(round_trip(codec, *step)) > 0

    check()
    codec.close()


def test_counting_what_moonclip_wrote_is_no_part_of_its_time(monkeypatch):
    pytest.importorskip("moonclip", reason="not installed")
    from peers import moonclip

    counted, count = [], moonclip._disk_usage

    def counting(directory):
        counted.append(count(directory))
        return counted[-1]

    monkeypatch.setattr(moonclip, "_disk_usage", counting)
    codec = peers.FACTORIES["moonclip"](1)
    old = {"w": np.arange(100_000, dtype=np.uint16)}
    codec.prepare(old)
    before = counted.copy()
    payload = codec.encode(old, {"w": old["w"] ^ 1})
    assert counted == before
    assert size_of(payload) == counted[-1] - before[-1] > 0
    codec.close()


@pytest.mark.parametrize("place", [0, 1 << 15, -1])
def test_xor_finds_a_change_wherever_it_is(place):
    codec = next(iter(peers.FACTORIES.values()))(1)
    old = {name: np.zeros(100_000, np.uint16) for name in "ab"}
    new = {name: array.copy() for name, array in old.items()}
    new["a"][place] = 1
    assert list(round_trip(codec, old, new)) == ["a"]
    codec.close()


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.label)
def test_ours_is_lossless_in_every_mode(mode):
    rng = np.random.default_rng(0)
    old = {
        "wide": rng.standard_normal((700, 1024)).astype(BF16),
        "f32": rng.standard_normal(5000).astype(np.float32),
        "f8": rng.standard_normal((9, 11)).astype(ml_dtypes.float8_e4m3fn),
        "scalar": np.array(-0.0, np.float64),
        "empty": np.zeros((0, 4), BF16),
    }
    new = {name: array.copy() for name, array in old.items()}
    for array in bits(new).values():
        flat = array.reshape(-1)
        flat[::7] ^= flat.dtype.type(1)
    bits(new)["wide"][0, :4] = [0x8000, 0x7FC1, 0xFFFF, 0x7F80]
    codec = Blocks(mode, old)
    assert size_of(round_trip(codec, bits(old), bits(new))) < sum(array.nbytes for array in old.values()) / 2
    codec.close()


@pytest.mark.parametrize("gap", [65_535, 65_536, 65_537, 131_071, 131_072, 200_000])
def test_gaps_of_any_width(gap):
    """Of 16 bits and more: TRL's gaps are bridged, the other coders' rows and columns take another type."""
    old = {"x": np.zeros(gap + 5, np.uint16), "rows": np.zeros((gap // 2 + 3, 2), np.uint8)}
    new = {name: array.copy() for name, array in old.items()}
    new["x"][[0, gap + 1]] = 1
    new["rows"][[0, -1], 1] = 9
    for name in PEERS[:5]:
        round_trip(peers.FACTORIES[name](1), old, new)


def test_sizes_are_those_of_the_layouts():
    """Independent of the coders: bytes that follow from the layout alone."""
    old = {"x": np.zeros((64, 64), np.uint16)}
    new = {"x": old["x"].copy()}
    new["x"].reshape(-1)[::8] = np.random.default_rng(0).integers(1, 1 << 16, 512)
    data = {name: size_of(peers.FACTORIES[name](1).encode(old, new)) for name in PEERS[:5]}
    assert 512 * 6 < data["sparse safetensors (int32)"] < 512 * 6 + 200
    assert 512 * 4 < data["uint16 gaps + value"] < 512 * 4 + 200
    raw = peers.FACTORIES["XOR + zstd-1"](1)
    assert raw.encode(old, new).keys() == {"x"}
    assert raw.encode(old, old) == {}


def test_a_peer_without_its_library_says_so(monkeypatch):
    def missing(threads):
        raise ImportError("No module named 'nothing'")

    monkeypatch.setitem(peers.FACTORIES, "moonclip", missing)
    (absent,) = [peer for peer in peers.peers(1) if peer.name == "moonclip"]
    assert absent == Absent("moonclip", "not installed (No module named 'nothing')")


# -- entropy bounds -----------------------------------------------------------------------------------------


def test_entropies_of_known_distributions():
    assert bounds.entropy_bits([4, 4]) == 8  # 8 symbols of 1 bit
    assert bounds.entropy_bits([1, 1, 1, 1]) == 8  # 4 symbols of 2 bits
    assert bounds.entropy_bits([7]) == bounds.entropy_bits([]) == bounds.entropy_bits([0, 5]) == 0
    assert bounds.entropy_bits([1, 3]) == pytest.approx(2 + 3 * math.log2(4 / 3), rel=1e-12)
    assert bounds.binary_entropy_bits(np.array([4, 0, 8]), np.array([8, 5, 8])) == 8


def test_bounds_of_known_steps():
    """Where a change follows from the exponent its position is free; where chances are alike it is a bit."""
    old = {"x": np.repeat(np.array([100 << 7, 120 << 7], np.uint16), 32)}
    new = {"x": old["x"].copy()}
    new["x"][:16] += np.uint16(1)
    new["x"][16:32] -= np.uint16(1)
    found = bounds.measure_bounds(old, new, {"x": "BF16"})
    assert found == bounds.Bounds(32, 64.0, 0.0, 32.0, 32.0)
    assert list(found.per_change().values()) == [3 / 8, 1 / 8, 1 / 8]
    # And where the difference follows from the exponent, it costs nothing.
    new["x"] = old["x"].copy()
    new["x"][:16] += np.uint16(1)
    new["x"][32:48] += np.uint16(2)
    found = bounds.measure_bounds(old, new, {"x": "BF16"})
    assert found == bounds.Bounds(32, 64.0, 64.0, 32.0, 0.0)
    # Of what is no float all is one class, and nothing costs nothing.
    assert bounds.measure_bounds(old, new, {"x": "I16"}).positions_by_exponent == 64.0
    assert bounds.measure_bounds(old, old, {"x": "BF16"}) == bounds.Bounds(0, 0.0, 0.0, 0.0, 0.0)
    assert set(bounds.measure_bounds(old, old, {"x": "BF16"}).per_change().values()) == {0.0}


def test_bounds_are_of_runs():
    """A tensor whose second MiB changes whole costs no positions; one class over all would."""
    run = bounds.REGION_BYTES // 2
    old = {"x": np.zeros(2 * run, np.uint16)}
    new = {"x": np.repeat(np.array([0, 1], np.uint16), run)}
    assert bounds.measure_bounds(old, new, {"x": "BF16"}).positions == 0.0


# -- inputs -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trace():
    return inputs.synthetic_trace(1_000_000, 2, lr=3e-6)


def test_synthetic_weights_change_as_trained_ones_do(trace):
    """Of each 200 weights about one or two change, by one unit mostly, and small ones far more often."""
    old, new = (bits(state) for state in trace.states[:2])
    share = changes(old, new) / sum(array.size for array in old.values())
    assert 0.005 < share < 0.012
    before, after = (np.concatenate([a.reshape(-1) for a in state.values()]) for state in (old, new))
    moved = np.abs((after - before).astype(np.int16))
    assert (moved[moved > 0] == 1).mean() > 0.8
    exponent = (before >> 7) & 255
    rates = [(moved[exponent == e] > 0).mean() for e in (122, 120, 118, 116, 114)]
    assert all(2.5 < small / large < 6 for large, small in pairwise(rates)), rates
    again = SyntheticTraining(1_000_000, lr=3e-6)
    assert same_bits(bits(again.state()), old)


def test_tiling_repeats_nothing_that_a_coder_could_use():
    """No block occurs twice, and coders need as many bytes a change as where nothing was tiled."""
    made = {
        copies: inputs.derive(inputs.synthetic_trace(weights, 1, lr=3e-6), 12)["llm"]
        for copies, weights in ((1, 6_200_000), (12, 520_000))
    }
    many = bits(made[12].make(0))
    digests = [
        codecs.cut(many, (name, index)).tobytes()
        for name, array in many.items()
        for index in range(array.nbytes >> 20)
    ]
    assert len(set(digests)) == len(digests) >= 11
    for name in PEERS[:5]:
        costs = {}
        for copies, one in made.items():
            old, new = bits(one.make(0)), bits(one.make(1))
            costs[copies] = size_of(peers.FACTORIES[name](1).encode(old, new)) / changes(old, new)
        assert costs[12] == pytest.approx(costs[1], rel=0.02), name


def test_tiling_keeps_every_weight():
    rows = np.arange(700 * 64, dtype=np.uint16).reshape(700, 64)
    tiled = inputs.tile(rows, 1400)
    assert np.array_equal(np.sort(tiled[:700], axis=None), np.sort(rows, axis=None))
    assert np.array_equal(np.sort(tiled[700:], axis=None), np.sort(rows, axis=None))
    assert np.array_equal(
        inputs.tile(rows + np.uint16(1), 1400), tiled + np.uint16(1)
    )  # whatever the content
    assert not np.array_equal(tiled[:700], tiled[700:])


def test_a_small_input_has_a_share_of_everything():
    rows = np.repeat(np.arange(8192, dtype=np.uint16), 64).reshape(8192, 64)
    taken = np.unique(inputs.tile(rows, 1500))
    assert len(taken) == 1500
    # Three runs of 512 rows, a third of all apart; the last one is not whole.
    assert np.bincount(taken // 2730, minlength=3).tolist() == [512, 512, 476]


def test_derived_inputs_are_what_they_say(trace):
    made = inputs.derive(trace, 4)
    states = {kind: [bits(given_input.make(step)) for step in range(3)] for kind, given_input in made.items()}
    for old, new in ((0, 1), (1, 2)):
        for kind, low, high in (("sparse", 0.00025, 0.00035), ("moment", 1, 1), ("fp8", 0.0001, 0.01)):
            before, after = states[kind][old], states[kind][new]
            share = changes(before, after) / sum(array.size for array in before.values())
            assert low <= share <= high, kind
    dtypes = {
        kind: set(codecs.dtype_names(given_input.make(0)).values()) for kind, given_input in made.items()
    }
    assert dtypes == {"llm": {"BF16"}, "sparse": {"BF16"}, "fp8": {"F8_E4M3", "F32"}, "moment": {"F32"}}
    weights = made["fp8"].make(0)["model.layers.0.weight"].astype(np.float32)
    assert np.abs(weights).max() == 448  # every row uses the whole range, and no value is NaN


def test_the_order_of_names_says_nothing(trace):
    """A version lists tensors that did not change first: the same step must be tiled alike."""
    first, second, third = trace.states
    turned = replace(trace, states=[first, dict(reversed(second.items())), third])
    for kind in ("llm", "sparse", "fp8"):
        expected, found = (bits(inputs.derive(one, 2)[kind].make(1)) for one in (trace, turned))
        assert same_bits(found, expected)


def test_traces_are_read_newest_last(tmp_path):
    state = {"x": np.arange(4096).astype(np.float32).astype(BF16)}
    for name in ("a", "b"):
        with df.create(tmp_path / name).writer() as writer:
            for step in range(4):
                bits(state)["x"][step] ^= np.uint16(1)
                writer.commit(step=step, tensors=state)
    found = inputs.read_traces(str(tmp_path), 2)
    assert [trace.key for trace in found] == ["a", "b"]
    assert [len(trace.states) for trace in found] == [3, 3]
    assert same_bits(bits(found[1].states[-1]), bits(state))
    assert changes(bits(found[1].states[0]), bits(found[1].states[1])) == 1
    (single,) = inputs.read_traces(str(tmp_path / "a"), 3)
    assert len(single.states) == 4
    with pytest.raises(ValueError, match=r"4 versions of main; 10 are needed"):
        inputs.read_traces(str(tmp_path / "a"), 9)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no directory of stores"):
        inputs.read_traces(str(tmp_path / "empty"), 1)


# -- measuring ----------------------------------------------------------------------------------------------


class Lossy:
    name = "lossy"
    note = ""

    def prepare(self, old):
        pass

    def encode(self, old, new):
        return {"all": b"x" * 7}

    def apply(self, payload, target):
        pass

    def close(self):
        pass


def test_a_coder_that_loses_bits_stops_the_run(trace):
    given_input = inputs.trace_input(trace)
    with pytest.raises(coding.LossyError, match="lossy is not lossless"):
        coding.measure_coding(given_input, modes=(), peers=[(1, Lossy())], rounds=1, report=silent)
    with pytest.raises(coding.LossyError, match="lossy"):
        stores.measure_stores(given_input, [(MODES[0], Lossy())], rounds=1, report=silent)


def test_end_to_end_times_are_sums():
    row = coding.CodecRow("x", False, 1, "", nbytes=125e6, per_change=1.0, encode_s=2.0, apply_s=3.0)
    two_threads, absent = replace(row, threads=2), coding.CodecRow("y", False, 1, "", absent="gone")
    (found,) = bench_run.link_times([row, two_threads, absent], [])
    assert found["seconds"] == pytest.approx({"0.1": 15.0, "1": 6.0, "10": 5.1, "100": 5.01})


def test_shapes_of_large_models():
    weights = {shape.name: sum(math.prod(dims) for _, dims in shape.tensors()) for shape in shapes.SHAPES}
    assert 7.5e9 < weights["7B"] < 7.7e9
    assert 1.0e12 < weights["1T"] < 1.05e12
    cost = shapes.measure_manifest(shapes.SHAPES[0], [1000, 2000], chain=3)
    assert cost.pieces == 3 * cost.blocks
    assert 1000 * 0.9 < cost.delta_bytes / cost.blocks < 2000
    assert cost.manifest_bytes > 16 * cost.blocks  # digests do not compress


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_memory_is_measured_in_a_process_of_its_own():
    found = memory.measure_memory(40, 3)
    assert 30e6 < found["state"] < 45e6
    assert found["state"] * 0.9 < found["writer"] < found["state"] + 150e6  # the baseline is a copy
    assert found["cold read"] > found["state"] * 0.9
    assert found["follow"] > found["state"] * 0.9
    assert 0 <= found["growth"] < 16e6


def test_chain_lengths_are_compared():
    rows = rebase.measure_rebase(
        rebase.synthetic_states(300_000, 12),
        rebase.chain_policies((3, 6)),
        block_bytes=1 << 14,
        report=silent,
    )
    short, long, smallest, lightest = rows
    assert [row.policy for row in rows] == ["chain 3", "chain 6", "smallest", "lightest"]
    assert short.rebase_bytes > long.rebase_bytes > 0
    assert smallest.rebase_bytes < long.rebase_bytes
    assert lightest.own_bytes > smallest.own_bytes
    for row in rows:
        assert row.steps == 12
        assert row.uploaded > row.own_bytes + row.rebase_bytes
        assert row.cold_max >= row.cold_mean > row.nbytes * (0.6 if row is smallest else 0.99)
        assert 1 <= row.follow_ratio_max < 1.05  # a follower fetches its step and no re-base
        assert row.manifest_max >= row.manifest_mean > 0
    assert smallest.first_bytes < 0.75 * smallest.nbytes < 0.75 * long.first_bytes


# -- the command --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small():
    """A quick profile that is smaller still."""
    patch = pytest.MonkeyPatch()
    profile = replace(bench_run.QUICK, weights=400_000, many=(200,), commits=6, growth_steps=2)
    patch.setattr(bench_run, "QUICK", profile)
    yield
    patch.undo()


@pytest.fixture(scope="module")
def ran(small, tmp_path_factory):
    """One run of the command: its document and its tables."""
    import contextlib
    import io

    place = tmp_path_factory.mktemp("bench")
    arguments = ["bench", "--quick", "--mb", "4", "--rounds", "1", "--json", str(place / "bench.json")]
    if importlib.util.find_spec("matplotlib") is not None:
        arguments += ["--plot", str(place / "bench.svg")]
    printed, told = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(told):
        assert main(arguments) == 0, told.getvalue()
    return json.loads((place / "bench.json").read_text()), printed.getvalue(), told.getvalue(), place


def test_the_document_has_what_is_promised(ran):
    document, _, _, _ = ran
    promised = (
        "deltaformat profile seconds machine peers real main inputs stores parts planes"
        " manifests many log memory ratios links"
    )
    assert set(document) == set(promised.split())
    assert document["main"] == "llm/lr-3e-06"
    kinds = [given_input["key"].partition("/")[0] for given_input in document["inputs"]]
    assert kinds == ["trace", "llm", "fp8", "moment", "sparse", "trace", "llm"]
    for given_input in document["inputs"]:
        rows = {(row["name"], row["threads"]): row for row in given_input["rows"] if row["absent"] is None}
        raw = given_input["nbytes"]
        ours = min(row["nbytes"] for row in rows.values() if row["ours"])
        assert ours < rows[("XOR + zstd-1", 1)]["nbytes"] < raw
        assert raw <= rows[("whole safetensors", 1)]["nbytes"] < raw * 1.1
        assert all(row["encode_s"] > 0 and row["apply_s"] > 0 for row in rows.values())
        if not given_input["key"].startswith("moment"):
            independent, positions, both = given_input["bounds"].values()
            assert 0 < both <= positions <= independent
            plain = next(row for row in rows.values() if row["name"].endswith("no strata)"))
            assert independent * 0.95 < plain["per_change"]
        (store, *_) = document["stores"][given_input["key"]]
        assert store["payload_per_change"] < store["per_change"]
        assert 0.99 < store["full_ratio"] < 1.1
        assert set(store["seconds"]) == {
            *("first commit", "commit", "follow", "cold read", "open", "one row"),
            *("commit: encode", "commit: stage", "commit: manifest", "commit: record"),
        }
    modes = {(row["mode"], row["threads"]) for row in document["stores"][document["main"]]}
    assert ("NumPy, no strata", 1) in modes
    assert ("NumPy, strata", 2) in modes
    parts = next(iter(document["parts"][document["main"]].values()))
    assert list(parts) == [
        *("diff", "digest", "encode", "pack", "hash", "write", "fetch", "decode", "apply", "verify")
    ]
    assert 0.6 < document["planes"]["ratio"] < 0.75


def test_the_ratios_that_must_be_shown(ran):
    document, _, _, _ = ran
    names = " | ".join(ratio["name"] for ratio in document["ratios"])
    for wanted in (
        *("all objects per changed weight", ": encode / XOR + zstd-1", ": decode + apply / XOR + zstd-1"),
        *("manifest at chain 16", "in planes / raw", "in planes, decoding", "growth of memory"),
        *("commit, speed of two threads / one", "cold read, speed of two threads / one"),
    ):
        assert wanted in names, wanted
    assert all(ratio["value"] >= 0 for ratio in document["ratios"])
    manifest = next(ratio for ratio in document["ratios"] if "manifest" in ratio["name"])
    assert 0.001 < manifest["value"] < 0.2


def test_the_tables(ran):
    document, text, told, _ = ran
    for heading in ("B a change", "entropy: positions given", "100 Gbit/s", "of the step", "XOR encode"):
        assert heading in text
    assert all(line.isprintable() for line in text.splitlines())
    for row in document["links"]:
        assert row["name"] in text
    assert told.count("\n") > 5  # progress
    assert "Traceback" not in told


def test_the_figure(ran, tmp_path):
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    document, _, _, place = ran
    assert b"<svg" in (place / "bench.svg").read_bytes()
    from deltaformat.cli import bench_plot

    bench_plot.draw(document, str(tmp_path / "bench.png"))
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_rebase_from_the_command_line(capsys, tmp_path):
    code = main(["bench", "--rebase", "--quick", "--steps", "5", "--chains", "3,4", "--json"])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    document = json.loads(captured.out)
    assert [row["policy"] for row in document["rebase"]] == [*("chain 3", "chain 4", "smallest", "lightest")]
    from deltaformat.cli import bench_tables

    assert "follow mean" in "\n".join(bench_tables.rebase(document))
    if importlib.util.find_spec("matplotlib") is not None:
        from deltaformat.cli import bench_plot

        bench_plot.draw(document, str(tmp_path / "rebase.png"))
        assert (tmp_path / "rebase.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--plot", "x.gif"], "--plot takes a file that ends with .png or .svg [plot-format]"),
        (["--json", "no/such/place.json"], "there is no such directory to write to [no-directory]"),
        (["--trace", "no-such-store"], "[store-missing]"),
        (["--peers", "no-such-peers"], "--peers: No module named 'no-such-peers' [peers]"),
        (["--chains", "1,4"], "chains have 2 to 64 pieces"),
    ],
)
def test_what_cannot_be_done_is_one_line(small, arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "--quick", "--mb", "1", "--rounds", "1", *arguments]) in (1, 2)
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(error) == 1
    assert message in error[0]


def test_without_matplotlib_it_is_told_before_the_work(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(bench_command.importlib.util, "find_spec", lambda name: None)
    assert main(["bench", "--plot", str(tmp_path / "x.png")]) == 1
    assert capsys.readouterr().err == (
        "error: --plot needs matplotlib: pip install 'deltaformat[bench]' [not-installed]\n"
    )


def test_an_installed_package_has_no_peers(small, capsys, monkeypatch, tmp_path):
    """Nothing but synthetic weights and our own coders; and it says so."""
    monkeypatch.setattr(codecs, "__file__", str(tmp_path / "site-packages/deltaformat/bench/codecs.py"))
    monkeypatch.setattr(bench_run, "measure_memory", lambda *_: None)
    assert main(["bench", "--quick", "--mb", "1", "--rounds", "1"]) == 0
    captured = capsys.readouterr()
    assert "no peers: tools/bench/peers is not beside the package; name it with --peers" in captured.err
    assert "without peers" in captured.out
    assert "XOR + zstd-1" not in captured.out.replace("XOR encode", "")
    assert "deltaformat (NumPy, strata)" in captured.out
