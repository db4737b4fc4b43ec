"""Two hosts as two network namespaces of this machine: a Horovod job over ssh."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import jobs
import pytest

import ssh_server
from oomrun import hosts
from oomrun.core import events as ev

SCRIPT = """
import os, time
import keras, numpy as np
keras.config.set_floatx("float64")
keras.utils.set_random_seed(3)
random = np.random.default_rng(0)
x = random.normal(size=(250, 24))
y = np.sin(x @ random.normal(size=(24, 1)))
model = keras.Sequential([
    keras.Input((24,)), keras.layers.Dense(64, "tanh"), keras.layers.Dense(1),
])
model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
class Slow(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(float(os.environ.get("SLOW", "0")))
history = model.fit(
    x, y, batch_size=96, epochs=3, verbose=0, callbacks=[Slow()]
).history
rank = os.environ.get("OOMRUN_RANK", "0")
values = [np.asarray(history[name]) for name in ("loss", "mae")]
np.savez(f"weights-{rank}.npz", *model.get_weights(), *values)
"""
# Addresses that nobody has been given (RFC 5737).
HERE, THERE = "192.0.2.1", "192.0.2.2"
IP = shutil.which("ip", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def ip(*words: str) -> None:
    assert IP is not None
    subprocess.run([IP, *words], check=True, capture_output=True)


@contextlib.contextmanager
def two_networks() -> Iterator[tuple[str, str]]:
    """The names of two namespaces with a cable between them."""
    here, there = (f"oomrun-{os.getpid()}-{side}" for side in ("a", "b"))
    with contextlib.ExitStack() as stack:
        for name, address in ((here, HERE), (there, THERE)):
            ip("netns", "add", name)
            stack.callback(ip, "netns", "delete", name)
            # `ip netns exec` puts it in the place of /etc/hosts.
            (folder := Path("/etc/netns") / name).mkdir(parents=True)
            stack.callback(shutil.rmtree, folder)
            known = f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n"
            (folder / "hosts").write_text(known)
        ip("-n", here, "link", "add", "cable", "type", "veth",
           "peer", "name", "cable", "netns", there)  # fmt: skip
        for name, address in ((here, HERE), (there, THERE)):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            for link in ("cable", "lo"):
                ip("-n", name, "link", "set", link, "up")
        yield here, there


@pytest.fixture
def networks(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """The namespaces, an sshd in the second, and the words to come to it."""
    if ssh_server.SSHD is None or IP is None:
        pytest.skip("sshd or ip is not installed (Debian: openssh-server, iproute2)")
    with contextlib.ExitStack() as stack:
        try:
            here, there = stack.enter_context(two_networks())
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not allowed: {error.stderr.decode()}")
        inside = [IP, "netns", "exec", there]
        (tmp_path / "ssh").mkdir()
        ssh, _ = stack.enter_context(
            ssh_server.running(tmp_path / "ssh", THERE, inside)
        )
        yield here, ssh


def start(
    run: jobs.Job, networks: tuple[str, str], *options: str, **env: str
) -> subprocess.Popen[bytes]:
    here, ssh = networks
    inside = [IP, "netns", "exec", here]
    return run.start(*options, env={hosts.SSH: ssh, **env}, inside=inside)


JOB = (
    f"strategy: horovod\nhosts: [{HERE}, {THERE}]\n"
    "devices: {cpu: 1, memory: 300MiB}\ncheckpoint: {every: 2 steps}\n"
)


@pytest.mark.slow
def test_two_hosts_train_as_one(tmp_path: Path, networks: tuple[str, str]) -> None:
    run = jobs.make(tmp_path / "job", SCRIPT, JOB)
    process = start(run, networks)
    try:
        assert process.wait(400) == 0, run.everything()
    finally:
        process.kill()
        process.wait()
    (started,) = run.events(ev.AttemptStarted)
    assert [d["host"] for d in started.plan["devices"]] == [0, 1]
    (plain := tmp_path / "plain").mkdir()
    jobs.python(run.folder / "train.py", cwd=plain)
    weights = [run.folder / f"weights-{rank}.npz" for rank in range(2)]
    assert jobs.identical(*weights)
    assert jobs.distance(weights[0], plain / "weights-0.npz") < 1e-10
    assert jobs.gone(run)


@pytest.mark.slow
def test_a_cut_cable_ends_all_and_it_goes_on(
    tmp_path: Path, networks: tuple[str, str]
) -> None:
    run = jobs.make(tmp_path / "job", SCRIPT, JOB)
    process = start(run, networks, "--meet-within", "20s", SLOW="1")
    here, _ = networks
    try:
        run.wait_for(ev.CheckpointSaved)
        ip("-n", here, "link", "set", "cable", "down")
        ended = run.wait_for(ev.AttemptEnded)
        assert ended.summary == f"worker 1: the worker is gone with member 1 ({THERE})"
        # Over there nobody was told: they end since they hear nothing any more.
        until = time.monotonic() + 120
        while len(run.processes()) > 0 and time.monotonic() < until:
            time.sleep(0.2)
        assert run.processes() == []
        # There is no host to start it on again.
        assert process.wait(300) == 4, run.everything()
    finally:
        process.kill()
        process.wait()
    ip("-n", here, "link", "set", "cable", "up")
    process = start(run, networks)
    try:
        assert process.wait(400) == 0, run.everything()
    finally:
        process.kill()
        process.wait()
    (plain := tmp_path / "plain").mkdir()
    jobs.python(run.folder / "train.py", cwd=plain)
    weights = run.folder / "weights-0.npz"
    assert jobs.distance(weights, plain / "weights-0.npz") < 1e-10
    assert jobs.gone(run)
