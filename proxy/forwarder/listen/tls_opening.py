"""The TLS handshakes of clients, by callback in the reactor: none costs a task, unless it fails.

They take turns, fairly between addresses.
"""

import contextlib
import os
import select
from collections.abc import Callable

import trio

from proxy.forwarder.disconnect_cause import DisconnectCause
from proxy.forwarder.listen.transports import ListenerTransport
from proxy.runtime.loop.deadlines import Deadlines
from proxy.runtime.loop.reactor import Reactor
from proxy.runtime.loop.tasks import close_gracefully
from proxy.runtime.loop.tcp_stream import TcpStream
from proxy.runtime.network.handshake_turns import HandshakeTurns
from proxy.runtime.network.tls import TlsFailed, TlsStream, broke_off_in_handshake, continue_handshake

RECEIVE_BYTES = 16_384

Outcome = TlsStream | Exception | DisconnectCause


class TlsOpening:
    """One client's TLS handshake. ``on_done`` is called once, with its stream, or with why there is none.

    The connection is closed then: for a TlsFailed behind the alert, which the client gets the time to read.
    """

    def __init__(  # noqa: PLR0917 -- the services of a forwarder, then the client
        self,
        reactor: Reactor,
        turns: HandshakeTurns,
        deadlines: Deadlines,
        nursery: trio.Nursery,
        listener: ListenerTransport,
        transport: TcpStream,
        *,
        owner: str,
        on_done: Callable[["TlsOpening", Outcome], None],
    ) -> None:
        self._reactor = reactor
        self._turns = turns
        self._deadline = deadlines.new_deadline(self._on_deadline)
        self._nursery = nursery
        self._listener = listener
        self._transport = transport
        self._owner = owner
        self._on_done = on_done
        self._timeout_s = 0.0
        self._stream: TlsStream
        self._unsent = b""
        self._is_done = False
        self._is_over = False
        self._closing: trio.CancelScope | None = None
        self._end_cause: DisconnectCause | None = None

    def start(self, timeout_s: float, accepted_at: float | None = None) -> None:
        """Start the handshake; about once a second the listener's files are looked at before, in a thread.

        ``accepted_at``: from when on it has its time, in Trio's; by default now.
        """
        self._timeout_s = timeout_s
        self._deadline.set((trio.current_time() if accepted_at is None else accepted_at) + timeout_s)
        if self._listener.must_check_files:
            self._nursery.start_soon(self._start_with_current_files)
        else:
            self._start()

    async def _start_with_current_files(self) -> None:
        try:
            await self._listener.check_files()
        except Exception as error:  # noqa: BLE001 -- an internal error of one client must not end all the others
            self._finish(error)
        else:
            self._start()

    def _start(self) -> None:
        if self._is_over:
            return
        try:
            self._stream = TlsStream(self._transport, self._listener.front_context, server_side=True)
            self._watch(select.EPOLLIN)
        except Exception as error:  # noqa: BLE001 -- other clients are accepted
            self._finish(error)

    def end(self, cause: DisconnectCause) -> None:
        """Close the connection at once, without an alert; does nothing if the handshake is over."""
        if self._closing is not None:
            self._end_cause = cause
            self._closing.cancel()
        else:
            self._finish(cause)

    def evict(self) -> None:
        """Close the connection at once, for a newcomer."""
        self.end(DisconnectCause.GAVE_WAY)

    def _on_deadline(self) -> None:
        self._finish(TlsFailed(f"the TLS handshake was not finished within {self._timeout_s} s", "timeout"))

    def _stop(self) -> None:
        self._is_over = True
        self._deadline.close()
        self._turns.remove(self._owner, self)
        self._reactor.forget(self._transport.socket.fileno())

    def _finish(self, outcome: Outcome) -> None:
        if self._is_over:
            return
        self._stop()
        if not isinstance(outcome, TlsStream):
            self._transport.close_now()
        self._on_done(self, outcome)

    # ---- turns

    def _watch(self, mask: int) -> None:
        self._reactor.watch(self._transport.socket.fileno(), mask, self._on_ready)

    def _on_ready(self) -> None:
        self._reactor.forget(self._transport.socket.fileno())  # until it has had its turn
        self._turns.add(self._owner, self)

    def take_turn(self) -> None:
        """Continue the handshake with what is there from the client."""
        try:
            if self._unsent:
                self._send()
            else:
                self._receive()
        except OSError as error:
            self._finish(broke_off_in_handshake(error))
        except Exception as error:  # noqa: BLE001 -- an internal error of one client must not end all the others
            self._finish(error)

    def _receive(self) -> None:
        try:
            data = os.read(self._transport.socket.fileno(), RECEIVE_BYTES)
        except BlockingIOError:
            self._watch(select.EPOLLIN)
            return
        session = self._stream.session
        try:
            self._is_done = continue_handshake(session, data, is_end=not data)
        except TlsFailed as error:
            self._refuse(error, session.take_outgoing())
            return
        self._unsent = session.take_outgoing()
        if self._is_done:
            self._listener.on_handshake_done(self._stream)
        self._send()

    def _send(self) -> None:
        if self._unsent:
            with contextlib.suppress(BlockingIOError):
                self._unsent = self._unsent[os.write(self._transport.socket.fileno(), self._unsent) :]
        if self._unsent:
            self._watch(select.EPOLLOUT)  # and nothing is read meanwhile
        elif self._is_done:
            self._finish(self._stream)
        else:
            self._watch(select.EPOLLIN)

    def _refuse(self, failure: TlsFailed, alert: bytes) -> None:
        """Close behind the alert, which gives the client the reason."""
        self._stop()
        with contextlib.suppress(OSError):
            os.write(self._transport.socket.fileno(), alert)
        self._closing = trio.CancelScope()
        self._nursery.start_soon(self._close, failure, self._closing)

    async def _close(self, failure: TlsFailed, closing: trio.CancelScope) -> None:
        try:
            with closing:
                await close_gracefully(self._transport)
        finally:
            self._transport.close_now()
            self._on_done(self, self._end_cause or failure)
