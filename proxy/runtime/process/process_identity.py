"""Identity of a process of the cluster: its role and number, and its process id once it was replaced."""

from dataclasses import dataclass

from proto.rpc_pb2 import Place


@dataclass(frozen=True, order=True, slots=True)
class ProcessIdentity:
    """Identity of a process: role and number.

    ``leaving_pid``: the process id of a worker that was replaced and finishes its connections; 0: the current worker.
    """

    role: str
    index: int
    leaving_pid: int = 0

    @classmethod
    def from_protobuf(cls, place: Place) -> "ProcessIdentity":
        """Convert from protobuf."""
        return cls(place.role, place.index, place.leaving_pid)

    def to_protobuf(self) -> Place:
        """Convert to protobuf, for the channel between supervisor and admin worker."""
        return Place(role=self.role, index=self.index, leaving_pid=self.leaving_pid)

    @property
    def worker_label(self) -> str:
        """The metrics' label ``worker``. No two processes share one, so that no counter looks like a reset of another
        process's counter.
        """
        return f"{self.index}-leaving-{self.leaving_pid}" if self.leaving_pid else str(self.index)
