"""A server for the clients of the Tinker API: many tenants train and sample adapters of one base model.

    rlite tinker --model Qwen/Qwen3-0.6B [folder=runs/tinker port=8000 ...]
    TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY="$(cat ~/.cache/rlite/tinker-token)" python recipe.py

The client is the unmodified package `tinker`, from release 0.25 on (docs/tinker.md).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import rlite
from rlite import config
from rlite.assembly.commands.generate import model_folder
from rlite.assembly.commands.options import TinkerConfig
from rlite.assembly.commands.served import tell_reach, until_interrupted
from rlite.assembly.launch import init_devices
from rlite.engine.inference import RliteInferenceEngine
from rlite.engine.train import RliteTrainEngine
from rlite.errors import ConfigError
from rlite.files import file_name
from rlite.runtime.storage.secrets import read_secret
from rlite.services.endpoint.guard import Names, make_token
from rlite.services.tinker.desk import Desk
from rlite.services.tinker.routes import Shop
from rlite.services.tinker.samples import Samples
from rlite.services.tinker.sampling import ServedAdapters
from rlite.services.tinker.server import TinkerServer
from rlite.services.tinker.tenants import Tenants
from rlite.services.tinker.trainer import Trainer
from rlite.trainer.model.modules import policy_module
from rlite.trainer.options import LaunchOptions

VARIABLE, PREFIX, OWNER = "RLITE_TINKER_TOKEN", "tml-", "default"


def main(argv: Sequence[str]) -> None:
    """Serve a model until SIGINT or SIGTERM."""
    options = config.load(TinkerConfig, TinkerConfig.arguments(argv))
    tokens = find_tokens(options, os.environ)
    path = model_folder(options.model)
    init_devices(LaunchOptions(launcher=options.launcher, num_devices=options.num_devices))
    try:
        serve = RliteInferenceEngine(path, executor=options.executor)
        serve.check_adapters(options=options.serve_options())
        train = RliteTrainEngine(policy_module(path))
        train.build(**options.train_options())
        serve.build(colocate_with=train, **options.serve_options())
        asyncio.run(run(train, serve, options, tokens, tell))
    finally:
        rlite.shutdown()


def find_tokens(options: TinkerConfig, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the tokens by tenant: the environment's, or those of a file, which is made if there is none.

    Args:
        options: options of the command.
        environment: variables of the process.

    Raises:
        ConfigError: a token is too short or has another beginning, or others can read the file.
    """
    file = Path(options.token_file).expanduser()
    text = environment.get(VARIABLE)
    if text is None:
        with suppress(FileExistsError):
            make_token(file, PREFIX)
        text = read_secret(file, "token_file")
    tokens: dict[str, str] = {}
    for line in text.splitlines():
        *name, token = line.split() or [""]
        owner = name[0] if name else OWNER
        where = f"token_file={options.token_file}" if VARIABLE not in environment else VARIABLE
        if len(name) > 1 or len(token) < 16 + len(PREFIX) or not token.startswith(PREFIX) or owner in tokens:
            told = f"expected a token, or lines of TENANT TOKEN, each of 20 or more characters from {PREFIX} on"
            raise ConfigError(f"{where}: {told}")
        try:
            tokens[file_name(owner)] = token
        except ValueError as error:
            raise ConfigError(f"{where}: tenant {error}") from error
    if len(set(tokens.values())) < len(tokens):
        raise ConfigError("token_file: two tenants have the same token")
    return tokens


async def run(
    train: RliteTrainEngine,
    serve: RliteInferenceEngine,
    options: TinkerConfig,
    tokens: Mapping[str, str],
    tell: Callable[[str, TinkerConfig], Any],
) -> None:
    """Serve engines until SIGINT or SIGTERM. For the main thread.

    Args:
        train: trains adapters.
        serve: samples.
        options: options of the command.
        tokens: token of each tenant.
        tell: called with the address when clients can connect.

    Raises:
        ConfigError: the address cannot be used.
    """
    async with (
        until_interrupted(options.host, options.port) as is_over,
        make_server(train, serve, options, tokens) as server,
    ):
        tell(server.url, options)
        await is_over.wait()


def make_server(
    train: RliteTrainEngine, serve: RliteInferenceEngine, options: TinkerConfig, tokens: Mapping[str, str]
) -> TinkerServer:
    """Return a server, which begins when it is entered. For a running event loop.

    Args:
        train: trains adapters.
        serve: samples.
        options: options of the command.
        tokens: token of each tenant.
    """
    module: Any = train.module
    tenants = Tenants(Path(options.folder).expanduser())
    served = ServedAdapters(serve, options.max_served)
    shop = Shop(
        tenants,
        Desk(Trainer(train, served, tenants, options), tenants, options),
        Samples(serve, served, tenants, options),
        serve.check_adapters,
        options.name or options.model,
        module.config.get_text_config().vocab_size,
        min(serve.context_length, options.max_tokens_per_microbatch),
        options,
    )
    return TinkerServer(shop, tokens, Names(options.host, options.host_names), options.port)


def tell(url: str, options: TinkerConfig) -> None:
    """Print how clients reach the server. The token itself is not printed."""
    secret = f"${VARIABLE}" if VARIABLE in os.environ else f"$(cat {options.token_file})"
    print(f"rlite tinker: {options.name or options.model} at {url}, kept in {options.folder}")
    print(f'  export TINKER_BASE_URL={url} TINKER_API_KEY="{secret}"')
    tell_reach(options.host, "data, weights")
