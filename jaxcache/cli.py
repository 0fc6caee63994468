"""The command line: `jaxcache demo`."""

import json
import pathlib
import sys
import traceback
from typing import Annotated

import typer

app = typer.Typer(
    name="jaxcache",
    help="The inference cache for hybrid language models in JAX.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)

DIFFERENT_TOKENS = 1
BAD_INPUT = 2
CRASH = 3


def main() -> None:
    """Runs the command line.

    An error of the program itself ends with a status of its own: 1 must mean that a
    token differs, and nothing else.
    """
    try:
        app()
    except Exception:
        traceback.print_exc()
        sys.exit(CRASH)


@app.callback()
def jaxcache() -> None:
    """The inference cache for hybrid language models in JAX."""
    # A callback keeps `demo` a subcommand, although it is the only one.


@app.command()
def demo(
    context: typer.Context,
    checkpoint: Annotated[
        pathlib.Path | None,
        typer.Option(
            help="Folder with a model in Hugging Face files (config.json, "
            "safetensors): bamba, nemotron_h or qwen3_next.",
            show_default="a tiny model, drawn from --seed",
        ),
    ] = None,
    conversations: Annotated[
        pathlib.Path | None,
        typer.Option(
            help="JSON Lines file; each line has `turns`, what the user says.",
            show_default="questions about the standard library's documentation",
        ),
    ] = None,
    text: Annotated[
        list[pathlib.Path] | None,
        typer.Option(help="Text file to ask questions about; may be given repeatedly."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Hold only the first conversations.")
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="The most tokens of an answer.")
    ] = 32,
    max_seqs: Annotated[
        int, typer.Option(min=1, help="The most requests that run at once.")
    ] = 8,
    pages: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Pages of attention cache.",
            show_default="room for everything",
        ),
    ] = None,
    rows: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Rows of recurrent state, live ones and snapshots.",
            show_default="room for everything",
        ),
    ] = None,
    tokens_per_page: Annotated[int, typer.Option(min=1, help="Tokens of a page.")] = 16,
    token_budget: Annotated[
        int, typer.Option(min=1, help="The most tokens that one step computes.")
    ] = 256,
    tensor_parallel: Annotated[
        int,
        typer.Option(
            min=1,
            help="Devices to split the model over; on CPU they are made of threads.",
        ),
    ] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Which tiny model to draw.")] = 0,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object instead of the table."),
    ] = False,
) -> None:
    """Serves conversations from the cache and proves that reuse changes no token.

    Every turn of every conversation is a request whose prompt holds all that was said
    before, the model's own answers included. All requests are served twice, first
    without and then with reuse of what earlier ones left in the cache, and their tokens
    are compared. Compilation is left out of all times.

    The exit status is 0 if all tokens are the same, 1 if one differs (the first request
    that does is named), 2 if the input cannot be used, and 3 if the program failed.
    """
    # Imported here so that `--help` does not wait for JAX.
    from rich.console import Console

    from jaxcache.demo.compare import Settings, compare
    from jaxcache.demo.conversations import BadInput
    from jaxcache.demo.dialogues import to_dialogue
    from jaxcache.demo.prepare import (
        checkpoint_speaker,
        choose_conversations,
        random_speaker,
        tensor_mesh,
    )
    from jaxcache.demo.report import progress_of, to_table

    messages = Console(stderr=True, highlight=False)
    try:
        mesh = tensor_mesh(tensor_parallel)
        talks = choose_conversations(conversations, text or [], limit)
        if context.obj is not None:
            speaker = context.obj
        elif checkpoint is not None:
            speaker = checkpoint_speaker(checkpoint, mesh)
        else:
            speaker = random_speaker(seed, mesh)
        messages.print(f"Model: {speaker.description}", markup=False)
        with progress_of(messages) as progress:
            comparison = compare(
                speaker.step,
                [to_dialogue(talk, speaker.tokens) for talk in talks],
                Settings(
                    max_new_tokens=max_new_tokens,
                    max_seqs=max_seqs,
                    num_pages=pages,
                    num_rows=rows,
                    tokens_per_page=tokens_per_page,
                    token_budget=token_budget,
                    eos_ids=speaker.eos_ids,
                ),
                mesh=mesh,
                progress=progress,
            )
    except BadInput as error:
        messages.print(f"Error: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(BAD_INPUT) from error
    if as_json:
        print(json.dumps(comparison.summary()))
    else:
        Console().print(to_table(comparison))
    if comparison.difference is not None:
        messages.print(str(comparison.difference), style="red", markup=False)
        raise typer.Exit(DIFFERENT_TOKENS)


if __name__ == "__main__":
    main()
