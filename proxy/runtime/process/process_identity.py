"""Which process of the cluster is meant: by its place, and by its process id where another has that place now."""

from dataclasses import dataclass

from proto.rpc_pb2 import Place


@dataclass(frozen=True, order=True, slots=True)
class ProcessIdentity:
    """A process. ``leaving_pid``: of a worker that was replaced and finishes what it has; 0: the place's own worker."""

    role: str
    index: int
    leaving_pid: int = 0

    @classmethod
    def from_protobuf(cls, place: Place) -> "ProcessIdentity":
        """From its protobuf form."""
        return cls(place.role, place.index, place.leaving_pid)

    def to_protobuf(self) -> Place:
        """For the line between supervisor and admin worker."""
        return Place(role=self.role, index=self.index, leaving_pid=self.leaving_pid)

    @property
    def worker_label(self) -> str:
        """The metrics' label ``worker``: no two processes have the same, so no counter of one reads as a reset of
        another's.
        """
        return f"{self.index}-leaving-{self.leaving_pid}" if self.leaving_pid else str(self.index)
