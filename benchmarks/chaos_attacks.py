"""Attacks on one process's services, each in a process of its own: `python -m benchmarks.chaos_attacks NAME OUT.json`.

Hostile rewards, a long message, half-open connections and the run folder of a stranger meet honest work, which has to
come to its end in time. A hostile process also reaches for its trainer in every way: limits, priority, cores, signals,
memory. Every attack is bounded in bytes, number and seconds, and stays on loopback. The file says what became of it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import os
import pickle
import resource
import struct
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import cloudpickle
import psutil

from benchmarks.injectors import FloodFault, HalfOpenFault, flood_descriptors, hold_half_open
from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.rollout import RewardFunction, ScriptedEngine
from rlite.rollout.openai import Access, AgentEndpoint, AgentSession
from rlite.runtime.sandbox.calls import Call, Code
from rlite.runtime.sandbox.pool import SandboxPool
from tests import hostile_rewards
from tests.hostile_runs import lead_out, often, texts_often, write_bomb
from tests.recorded_run import Shape, write_run
from tests.view_server import serving

SECRET = "CHAOS_API_TOKEN"
REWARD = 0.5
SOON_S = 10.0
"""longest wait of an honest request during an attack on the endpoint"""
GROWTH_MIB = 300.0
MESSAGE_BYTES = 8 << 20
CONNECTIONS = 1500


class _Touch:
    """Unpickled, it leaves a file behind."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def hostile(how: str, marker: str, **call: Any) -> float:
    """A reward function that attacks whoever runs it."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 20, 64 << 20))
    if how == "pickle":
        for head in ("<Q", ">Q", "<I", ">I", ""):
            body = pickle.dumps(_Touch(marker))
            frame = (struct.pack(head, len(body)) if head else b"") + body
            flood_descriptors(FloodFault(payload=frame, num_bytes=len(frame) * 8, seconds=0.3))
    if how == "flood":
        flood_descriptors(FloodFault(payload=os.urandom(1 << 16), num_bytes=512 << 20, seconds=3.0))
    if how == "forge":
        for number in range(64):
            answer = json.dumps({"number": number, "value": 1.0, "reward": 1.0}).encode() + b"\n"
            flood_descriptors(FloodFault(payload=answer, num_bytes=len(answer) * 4, seconds=0.1))
    if how == "clock":
        time.monotonic = lambda: -1e9  # type: ignore[assignment]
        time.sleep(60.0)
    if how == "patch":
        math.sqrt = lambda x: 1.0  # type: ignore[assignment]
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        os.environ["PATCHED"] = "1"
    if how == "secret":
        return float(SECRET in os.environ)
    return REWARD


def honest(**call: Any) -> float:
    """A reward that notices what another call has left behind."""
    is_clean = math.sqrt(4.0) == 2.0 and "PATCHED" not in os.environ
    return REWARD if is_clean and resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 64 else 0.0


async def attack_rewards() -> dict[str, Any]:
    """Hostile calls among honest ones, which must all have their reward."""
    os.environ[SECRET] = "secret"
    kinds = ["pickle", "flood", "forge", "clock", "patch", "secret"]
    with tempfile.TemporaryDirectory() as folder:
        marker = f"{folder}/code-ran"
        bad = RewardFunction(hostile, timeout=8.0, num_processes=2)
        good = RewardFunction(honest, timeout=20.0, num_processes=2)

        async def attack(how: str) -> float:
            with suppress(Exception):  # whatever becomes of it, it must not become of others
                return await bad.run(how=how, marker=marker)
            return 0.0

        work = [asyncio.ensure_future(attack(how)) for how in kinds]
        results = []
        for _ in range(24):
            results.append(await good.run())
            await asyncio.sleep(0.2)
        rewards = dict(zip(kinds, await asyncio.gather(*work), strict=True))
        results += [await good.run() for _ in range(4)]
        faults = {
            "code of the reward ran in the trainer": os.path.exists(marker),
            "an honest reward was changed": set(results) != {REWARD},
            "a secret was seen": rewards["secret"] == 1.0,
            "a reward was forged": rewards["forge"] not in (0.0, REWARD),
        }
    return {"faults": [fault for fault, is_so in faults.items() if is_so], "rewards": rewards}


def _ask(access: Access, content: str) -> int:
    """One request by an ordinary client; returns its status."""
    body = json.dumps({"model": access.model, "messages": [{"role": "user", "content": content}], "max_tokens": 4})
    headers = {"Authorization": f"Bearer {access.api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{access.base_url}/chat/completions", body.encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def _send_long_message(access: Access) -> None:
    with suppress(OSError):
        _ask(access, "x" * MESSAGE_BYTES)


def _open_connections(access: Access) -> None:
    port = int(access.base_url.rsplit(":", 1)[1].split("/")[0])
    hold_half_open(HalfOpenFault(port=port, count=CONNECTIONS, seconds=8.0, greeting=b"POST /v1/chat"))


async def attack_processes() -> dict[str, Any]:
    """A reward reaches for the trainer: itself, by code that it makes, and by a program that it starts."""
    cloudpickle.register_pickle_by_value(hostile_rewards)
    reached: dict[str, list[str]] = {}
    with closing(SandboxPool(1)) as pool:
        for origin in ("own code", "made code", "a program"):
            call = Call(
                Code.of(hostile_rewards.reach), cloudpickle.dumps({"target": os.getpid(), "origin": origin}), 60.0
            )
            for name in pool.submit(call).result():
                reached.setdefault(name, []).append(origin)
        eat = Call(Code.of(_fill_memfd), cloudpickle.dumps({}), 60.0, 256 << 20)
        if pool.submit(eat).exception() is None:
            reached["memory of files without a name"] = ["own code"]
    names = [*hostile_rewards.attempts(os.getpid()), "memory of files without a name"]
    lines = [f"{name}: {'reached by ' + ', '.join(reached[name]) if name in reached else 'refused'}" for name in names]
    return {"faults": [line for line in lines if "reached" in line], "lines": lines}


def _fill_memfd() -> None:
    file = os.memfd_create("memory")
    for _ in range(512):
        os.write(file, bytes(1 << 20))
    time.sleep(2.0)


async def attack_viewer() -> dict[str, Any]:
    """Half-open connections to the page of a run, whose folder has huge and misleading files."""
    with tempfile.TemporaryDirectory() as name:
        run = write_run(Path(name) / "run", Shape(steps=2, groups=2, samples=2))
        write_bomb(run, 3, 22_000, reason=often("x" * 1_000_000, 22_000))
        write_bomb(run, 4, 150, segments=texts_often("x" * 1_000_000, 150))
        lead_out(run, ["config.yaml", "record/train-00000001.rows.parquet"], Path(name) / "elsewhere")
        os.mkfifo(run / "results.json")
        told, tell = multiprocessing.Pipe(duplex=False)
        attacker = multiprocessing.get_context("spawn").Process(
            target=_attack_when_told, args=(_hold, told), daemon=True
        )
        attacker.start()
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))  # the attacker has begun, and may have more
        with serving([str(run)]) as url:
            tell.send(int(url.rsplit(":", 1)[1].split("/")[0]))
            waits = []
            while attacker.is_alive():
                began = time.monotonic()
                request = urllib.request.Request(url.split("?")[0] + "api/runs", headers={"X-Token": url.split("=")[1]})
                with urllib.request.urlopen(request, timeout=60) as response:
                    [about] = json.loads(response.read())
                waits.append(time.monotonic() - began)
                await asyncio.sleep(0.1)
    shown = about["sources"]["train"]["steps"]
    faults = {
        f"the page waited {max(waits):.1f} s": max(waits) > SOON_S,
        f"the page shows steps {shown}": shown != [2, 4],
        "a link was followed": len([text for text in about["problems"] if "leads out" in text]) < 2,
    }
    return {"faults": [fault for fault, is_so in faults.items() if is_so], "lines": about["problems"]}


def _hold(port: int) -> None:
    hold_half_open(HalfOpenFault(port=port, count=CONNECTIONS, seconds=8.0, greeting=b"GET / HTTP/1.1"))


def _attack_when_told(attack: Callable[[Any], None], told: Any) -> None:
    attack(told.recv())


async def attack_endpoint(attack: Callable[[Access], None]) -> dict[str, Any]:
    """An attacker in another process, and an honest client whose answers must come soon, with 1,024 descriptors."""
    told, tell = multiprocessing.Pipe(duplex=False)
    attacker = multiprocessing.get_context("spawn").Process(target=_attack_when_told, args=(attack, told), daemon=True)
    attacker.start()
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))  # the attacker has begun, and may have more
    engine = ScriptedEngine([[72, 105]])
    tokenizer = byte_tokenizer()
    sessions = [AgentSession(engine, tokenizer, {"max_new_tokens": 4}, max_length=4096) for _ in range(2)]
    waits, failed = [], 0
    async with (
        AgentEndpoint() as endpoint,
        endpoint.serving(sessions[0]) as ours,
        endpoint.serving(sessions[1]) as theirs,
    ):
        await asyncio.to_thread(_ask, ours, "hello")
        tell.send(theirs)
        ends = time.monotonic() + 40.0
        while attacker.is_alive() and time.monotonic() < ends:
            began = time.monotonic()
            try:
                failed += await asyncio.to_thread(_ask, ours, "hello") != 200
            except OSError:
                failed += 1
            waits.append(time.monotonic() - began)
            await asyncio.sleep(0.1)
        attacker.kill()
        attacker.join()
    longest = max(waits, default=0.0)
    faults = {
        f"{failed} of {len(waits)} honest requests failed": failed > 0,
        f"an honest request waited {longest:.1f} s": longest > SOON_S,
    }
    return {"faults": [fault for fault, is_so in faults.items() if is_so], "longest_wait": round(longest, 2)}


ATTACKS: dict[str, Callable[[], Awaitable[dict[str, Any]]]] = {
    "hostile rewards": attack_rewards,
    "long message": lambda: attack_endpoint(_send_long_message),
    "reaching for the trainer": attack_processes,
    "a stranger's run": attack_viewer,
    "half-open connections": lambda: attack_endpoint(_open_connections),
}


def run(name: str) -> dict[str, Any]:
    """Run an attack, and return its `faults` in words, its seconds, and the memory that this process took."""
    process, began = psutil.Process(), time.monotonic()
    before = process.memory_info().rss
    report = asyncio.run(ATTACKS[name]())  # type: ignore[arg-type]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    report["grown_mib"] = round((peak - before) / 2**20, 1)
    if report["grown_mib"] > GROWTH_MIB:
        report["faults"].append(f"the trainer grew by {report['grown_mib']:.0f} MiB")
    return {**report, "seconds": round(time.monotonic() - began, 2)}


def main() -> None:
    """Parse the command line, attack, print a line for each attack, write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=ATTACKS)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    report = run(args.name)
    print(*report.get("lines", ()), *report["faults"], sep="\n")
    args.out.write_text(json.dumps(report))


if __name__ == "__main__":
    main()
