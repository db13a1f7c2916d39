"""vrl's side of Ray, object store and worker-group calls: `python -m benchmarks.peer_sides.vrl_calls PART ROWS ...`.

Of the arguments, which are those of vrl_side.py, only ROWS is read.
"""

import sys
from typing import Any

import ray
import torch

from benchmarks.peer_sides.rounds import Case, private_stdout, serve, versions
from benchmarks.protocol import make_batch
from vrl.controller.calls import Calls
from vrl.controller.resource_pool import PoolSpec, ResourcePool
from vrl.controller.worker_group import ProcessGroup, WorkerGroup
from vrl.protocol.columns import OLD_LOG_PROBS
from vrl.protocol.dataproto import DataProto
from vrl.protocol.dispatch import Dispatch, register
from vrl.protocol.ragged import Ragged
from vrl.workers.host import ROLE_CLASSES


class Echo:
    """A role whose method costs nothing but the transport of the rows."""

    @register(Dispatch.ROWS, requires=(OLD_LOG_PROBS,), returns=(OLD_LOG_PROBS,))
    def shifted(self, rows: DataProto) -> DataProto:
        """Return one column, changed."""
        column = rows.ragged(OLD_LOG_PROBS)
        return DataProto({OLD_LOG_PROBS: Ragged(column.values + 1.0, column.offsets)})

    def call(self, _role: str, method: str, *arguments: Any) -> Any:
        """Answer as `WorkerHost` does."""
        return getattr(self, method)(*arguments)


def main() -> None:
    """Serve object store and worker group."""
    channel = private_stdout()
    torch.set_num_threads(1)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=2 * 2**30)
    ROLE_CLASSES["echo"] = Echo
    processes = object.__new__(ProcessGroup)  # without learners and engine: only the calls are measured
    handles: list[Any] = [ray.remote(Echo).options(num_cpus=0.5).remote() for _ in range(2)]
    processes.handles, processes.calls = handles, Calls()
    processes.pool = object.__new__(ResourcePool)
    processes.pool.spec = PoolSpec(
        name="echo", section="trainer", ranks_per_node=2, nodes=1, gpus=False, cpus_per_rank=1
    )
    group = WorkerGroup(processes, "echo", 1, share_prompts=False)
    whole = make_batch(int(sys.argv[2]))
    stored = ray.put(whole)
    cases = {
        "ray.put": Case(lambda _: ray.put(whole)),
        "ray.get": Case(lambda _: ray.get(stored)),
        "worker-group call, 2 ranks": Case(lambda _: group.call("shifted", whole), most_calls=10, seconds=10.0),
    }
    facts = {"versions": versions(["torch", "numpy", "ray"]), "mib": whole.nbytes() / 2**20}
    serve(cases, facts, channel)
    ray.shutdown()


if __name__ == "__main__":
    main()
