"""The names of hosts, as Slurm and MPI write them."""

from __future__ import annotations

import re

import pytest

from oomrun.core import host_names
from oomrun.core.errors import SpecError
from oomrun.core.jobfile import load
from oomrun.core.spec import Hostfile, Hosts


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node1", ["node1"]),
        ("a,b", ["a", "b"]),
        ("node[1-3]", ["node1", "node2", "node3"]),
        ("node[08-10,12]", ["node08", "node09", "node10", "node12"]),
        (
            "r[1-2]n[1-2]-ib,login",
            ["r1n1-ib", "r1n2-ib", "r2n1-ib", "r2n2-ib", "login"],
        ),
    ],
)
def test_lists_of_slurm(text: str, names: list[str]) -> None:
    assert list(host_names.expanded(text)) == names


@pytest.mark.parametrize(
    "text",
    ["", "a,", "a[1-2", "a]1[", "a[b]", "a[2-1]", "a[1-9999999]", "a[[1]]", "a,a",
     "a;b", "-oProxyCommand=x", "a b"],
)  # fmt: skip
def test_what_is_no_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        host_names.expanded(text)


def test_a_hostfile() -> None:
    text = "# ours\nnode1 slots=4\n\nnode2:2\nme@node3  # slow\nnode1\n"
    assert host_names.of_hostfile(text) == ("node1", "node2", "me@node3")


@pytest.mark.parametrize("text", ["", "# none\n", "-F x\n", "$(id)\n"])
def test_what_is_no_hostfile_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        host_names.of_hostfile(text)


@pytest.mark.parametrize(
    "name", ["-oProxyCommand=id", "a b", "a;id", "$(id)", "a'b", "@a", "a\nb", "", "-"]
)
def test_no_option_and_no_command_is_a_name(name: str) -> None:
    assert not re.fullmatch(host_names.HOST_PATTERN, name, re.ASCII)


JOB = "name: a\nscript: t.py\nstrategy: horovod\nhosts: "


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("[node1, me@10.0.0.2]", ("node1", "me@10.0.0.2")),
        ("slurm", "slurm"),
        ("{file: hosts.txt}", Hostfile("hosts.txt")),
    ],
)
def test_hosts_in_a_job_file(text: str, hosts: Hosts) -> None:
    spec = load(JOB + text, filename="job.yaml", environment={})
    assert spec.hosts == hosts


@pytest.mark.parametrize("text", ["[]", "[a, a]", "[-oX]", "mpi", "{}"])
def test_other_hosts_are_refused(text: str) -> None:
    with pytest.raises(SpecError):
        load(JOB + text, filename="job.yaml", environment={})


def test_one_strategy_alone_is_for_several_hosts() -> None:
    text = JOB.replace("horovod", "single") + "[a]"
    with pytest.raises(SpecError, match="strategy single trains on one host"):
        load(text, filename="job.yaml", environment={})


def test_hosts_are_not_for_a_command() -> None:
    text = "name: a\ncommand: [x]\nbatch: {global: 4}\nhosts: [a]\n"
    with pytest.raises(SpecError, match="a command starts its own workers"):
        load(text, filename="job.yaml", environment={})
