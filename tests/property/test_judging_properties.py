"""Whatever a log holds, it is judged, and in time that grows with its length."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomrun.cli.log_file import excerpt
from oomrun.core.judging import judge
from oomrun.core.log_forms import FORMS, MAY_MATTER
from oomrun.core.log_forms_translated import TRANSLATED, TRANSLATED_EXHAUSTIONS
from oomrun.core.log_lines import lines, unwrapped
from oomrun.core.remedies import LEVERS
from oomrun.core.verdict import clues_of, to_json

DATA = Path(__file__).parents[1] / "data"
TEXTS = [
    json.loads(line)["text"]
    for name in ("oom_logs.jsonl", "own_failures.jsonl")
    for line in (DATA / name).read_text().splitlines()
]
PIECES = sorted({line[:300] for text in TEXTS for line in text.splitlines()})

logs = st.lists(
    st.one_of(st.sampled_from(PIECES), st.text(max_size=80)), max_size=12
).map("\n".join)
evidence = st.dictionaries(
    st.sampled_from(
        [
            "cgroup_oom_kill",
            "k8s_reason",
            "worker_pids",
            "slurm_state",
            "shm_free_bytes",
        ]
    ),
    st.one_of(
        st.none(),
        st.integers(),
        st.text(max_size=9),
        st.lists(st.integers(), max_size=2),
    ),
)


@settings(deadline=None, max_examples=150)
@given(logs, st.one_of(st.none(), st.integers(-70, 260)), evidence)
def test_any_log_gets_a_verdict(
    text: str, exit_code: int | None, known: dict[str, object]
) -> None:
    found = judge(clues_of(text, exit_code, known))
    assert json.loads(json.dumps(to_json(found)))["summary"]
    assert 0 <= found.confidence <= 1
    assert set(found.levers) <= set(LEVERS)
    assert found.is_oom or found.kind in (
        "not_oom", "disk", "grpc", "protobuf_limit", "host_allocator"
    )  # fmt: skip


@settings(deadline=None, max_examples=100)
@given(st.text(max_size=2000))
def test_no_word_of_a_log_is_lost(text: str) -> None:
    assert all(line.text for line in lines(text))
    put = unwrapped(text)
    if put is not None:
        words = "".join("".join(text.splitlines()).split())
        assert "".join("".join(put.splitlines()).split()) == words


def test_the_words_that_matter_are_of_all_forms() -> None:
    """The filter before the forms must let through whatever one of them takes."""
    said = {line.text for text in TEXTS for line in lines(text)}
    left = [x for x in sorted(said) if not MAY_MATTER.search(x)]
    assert [x for x in left if any(form.pattern.search(x) for form in FORMS)] == []


def test_a_line_may_be_as_bad_as_it_likes() -> None:
    for piece in (
        "a.",
        "OOM ",
        "cudaA ",
        "[1]",
        "(pid=1 ",
        "Error.A",
        "NCCL WARN Cuda ",
    ):
        assert judge(clues_of(piece * 100_000, 1)).cause is not None


@settings(deadline=None, max_examples=30)
@given(st.binary(max_size=4096))
def test_any_bytes_can_be_read(raw: bytes) -> None:
    found = excerpt(io.BytesIO(raw))
    assert found.problem or found.size_bytes == len(raw)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 3_000_000), st.integers(0, 3_000_000))
def test_a_line_is_found_wherever_it_is_in_a_long_log(before: int, after: int) -> None:
    filler = b"step 3 of 9, all is well\n"
    oom = b"CUDA out of memory. Tried to allocate 7 GiB\n"
    log = filler * (before // 25) + oom + filler * (after // 25)
    found = excerpt(io.BytesIO(log))
    assert oom.decode().strip() in found.text
    assert len(found.text) < 2**20


EXHAUSTIONS = [form for form in TRANSLATED if form.role == "error"]


@settings(deadline=None, max_examples=300)
@given(st.one_of([st.from_regex(form.pattern, fullmatch=True) for form in EXHAUSTIONS]))
def test_the_search_knows_all_that_the_translated_forms_match(said: str) -> None:
    assert any(word in said for word in TRANSLATED_EXHAUSTIONS)
    assert all(len(word) > 2 for word in TRANSLATED_EXHAUSTIONS)


@pytest.mark.parametrize(
    "said",
    [
        "OSError: [Errno 12] Nicht genügend Hauptspeicher verfügbar",
        "cp: error al escribir 'a.h5': No queda espacio en el dispositivo",
        "tar: a.h5: Ошибка записи: На устройстве не осталось места",
        "bash: fork: 无法分配内存",
        "bash: fork: メモリを確保できません",
    ],
)
@pytest.mark.parametrize("filler", ["step 3 of 9\n", "10/90 ━━━━ loss: 0.3\n"])
def test_a_translated_line_is_found_in_a_long_log(said: str, filler: str) -> None:
    many = filler * (2**20 // len(filler))
    found = excerpt(io.BytesIO(f"{many}{said}\n{many}".encode()))
    assert said in found.text
    assert len(found.text) < 2**20
