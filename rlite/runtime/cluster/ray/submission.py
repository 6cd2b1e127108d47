"""Programs that the job server of a cluster runs (`ray job submit`). The submitter need not be able to join it."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path

from ray.dashboard.modules.job.common import JobStatus
from ray.exceptions import AuthenticationError
from ray.job_submission import JobSubmissionClient

from rlite.errors import ConfigError, RliteError


class JobServer:
    """Client of the job server on a cluster's head node."""

    def __init__(self, address: str) -> None:
        """Connect.

        `address`: such as http://127.0.0.1:8265.
        """
        missing = [name for name in ("aiohttp", "requests") if importlib.util.find_spec(name) is None]
        if missing:
            why = f"the client of Ray's job server needs {', '.join(missing)}: pip install 'ray[default]'"
            raise ConfigError(f"address={address}: {why}")
        try:
            self._client = JobSubmissionClient(address)
        except AuthenticationError as error:
            raise ConfigError(f"address={address}: {error}") from error
        except (ConnectionError, RuntimeError) as error:
            raise ConfigError(
                f"no Ray job server answers at address={address}: {error}. It is a part of Ray's dashboard: it runs "
                "on the head node if ray[default] is installed there (pip install 'ray[default]'), on port 8265"
            ) from error

    def submit(self, command: str, folder: Path, name: str) -> str:
        """Let the cluster run a command.

        `folder`: uploaded to the cluster; the command runs there. Returns the id of the submission.
        """
        try:
            return self._client.submit_job(
                entrypoint=command, runtime_env={"working_dir": str(folder)}, metadata={"name": name}
            )
        except (RuntimeError, ValueError) as error:
            raise ConfigError(f"the job server does not take job {name}: {error}") from error

    def follow(self, submission: str) -> None:
        """Print the output of a submitted command until it ends."""
        asyncio.run(self._print_output(submission))
        details = self._client.get_job_info(submission)
        if details.status != JobStatus.SUCCEEDED:
            raise RliteError(f"submission {submission}: {details.status}: {details.message}")

    async def _print_output(self, submission: str) -> None:
        async for lines in self._client.tail_job_logs(submission):
            print(lines, end="", flush=True)
