"""The command ``python -m partitioner.runtime.launch.torchrun``: torchrun, with the first cause as the last log line.

It takes torchrun's arguments and does the same::

    python -m partitioner.runtime.launch.torchrun --nproc-per-node 4 --max-restarts 2 train.py

If the workers run a :class:`partitioner.Watch` (``-m partitioner.runtime`` does), the log of a run that has finally
failed ends with one line: the rank that failed first, its instruction, graph node, module and source line. The log of
plain torchrun ends with a table. With several hosts each host prints its own line, unless the environment variable
``PARTITION_WATCH`` names a folder that all of them share.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError
from torch.distributed.run import parse_args, run

from partitioner.runtime.comm.rendezvous import SEPARATE_STORES
from partitioner.runtime.watch.stragglers import Monitor
from partitioner.runtime.watch.watchdog import FOLDER

_SETTLE_S = 0.5


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run torchrun with the command line ``arguments`` (by default those of the process), and exit the process: status
    0, or 1 if a rank failed.
    """
    options = parse_args(list(sys.argv[1:] if arguments is None else arguments))
    own = FOLDER not in os.environ
    folder = Path(tempfile.mkdtemp(prefix="watch-")) if own else Path(os.environ[FOLDER])
    if options.nnodes in ("1", "1:1"):  # with several hosts, each has its own folder, unless one is given
        os.environ[FOLDER] = str(folder)
    os.environ.setdefault(SEPARATE_STORES, "1")  # otherwise a restart finds the addresses of ranks that have ended
    try:
        run(options)
        status = 0
    except ChildFailedError as error:
        status = 1
        print(error, file=sys.stderr)
        print(f"first cause: {_find_first_cause(folder, error)}", file=sys.stderr)
    except RendezvousConnectionError as error:
        status = 1
        traceback.print_exception(error)
        print(f"first cause: {_explain_unreachable_host(options.rdzv_endpoint)}", file=sys.stderr)
    finally:
        if own:
            shutil.rmtree(folder, ignore_errors=True)
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(status)


def _explain_unreachable_host(endpoint: str) -> str:
    """Return the error text for a rendezvous host with the address ``endpoint`` that cannot be reached. In this case
    torchrun has ended its ranks before any of them could report an error.
    """
    return (
        f"the rendezvous host {endpoint} cannot be reached: it has ended, its network has failed, or its "
        "address is wrong; start the run again on as many hosts, with an --rdzv-endpoint that can be reached"
    )


def _find_first_cause(folder: Path, error: ChildFailedError) -> str:
    """Return a text with the first cause of the failure of torchrun's ranks: from the status files in ``folder`` of the
    last restart or, if they have no cause, from ``error``, the failure that torchrun saw.
    """
    rank, first = error.get_first_failure()
    attempts = sorted(folder.glob("attempt-*"), key=lambda p: int(p.name.split("-")[1]))
    found = Monitor(attempts[-1]).wait_for_cause(_SETTLE_S, died=rank) if attempts else None
    how = f"{first.signal_name()} " if first.exitcode < 0 else ""
    if found is None:
        message = first.message["message"] if isinstance(first.message, dict) else first.message
        told = " ".join(str(message).split()).removeprefix("InstructionError: ")
        if first.error_file == "<N/A>" and first.exitcode > 0:
            told = f"exited with status {first.exitcode} before it could report an error; its own output is above"
        return (
            f"{told}{f' ({how.strip()})' if how else ''}" if told.startswith("rank ") else f"rank {rank}: {how}{told}"
        )
    return f"{found}{f' ({how.strip()})' if how and found.rank == rank else ''}"


if __name__ == "__main__":
    main()
