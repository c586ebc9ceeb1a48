import os, socket, select, struct, ssl, pytest
from tls_ends import *
from proxy.runtime.network import kernel_tls as k
from proxy.runtime.network.tls_session import TlsSession
from connections import *
D = socket.MSG_DONTWAIT
P = socket.MSG_PEEK
def ex(c): 
    try: return k.examine(c.kernel, was_refused=False).name
    except k.KernelTlsBroken as e: return str(e)
def rv(c, n=100, f=0): return outcome(lambda: c.kernel.recv(n, f | D))
@pytest.mark.parametrize("v", [V2, V3])
def test_probe(tmp_path, v):
    s = Scene(tmp_path, version=v)
    def show(name, *x): print(v.name, name, x, flush=True)
    with Connection(s) as c:
        c.peer.send(b"one"); c.peer.send(b"two"); show("data", c.splice(), c.splice(), c.splice(), c.pipe.read())
        c.kernel.send(b"back"); show("back", c.peer.receive())
        c.peer.end(); show("end", c.splice(), rv(c), ex(c), ex(c), c.splice())
        k.receive_record(c.kernel); show("after notify", c.splice(), rv(c), ex(c))
    for is_server in (False,):
        with Connection(s, is_server=False) as c:
            c.peer.send(b"one"); show("client data", c.splice(), c.pipe.read())
            if v == V3:
                c.peer.socket.sendall(c.by_hand.make(22, b"\4\0\0\1x"))
    if v == V3:
        with Connection(s) as c:
            h, p = c.by_hand, c.peer.socket
            p.sendall(h.make(23, b"padded", 40)); show("padded", c.splice())
            p.sendall(h.make(23, b"")); show("empty alone", ex(c), c.splice(), c.splice())
            p.sendall(h.make(23, b"")); show("empty alone recv", rv(c), rv(c))
            p.sendall(h.make(23, b"")); show("empty alone peek", rv(c,100,P), rv(c,100,P), ex(c), c.splice(), c.splice())
            p.sendall(h.make(23, b"") + h.make(23, b"after")); show("empty then 5", c.splice(), ex(c), c.splice(), c.splice())
            p.sendall(h.make(23, b"") + h.make(23, b"after")); show("empty then 5, examine first", ex(c), c.splice(), c.splice(), c.splice())
            p.sendall(h.make(23, b"") + h.make(23, b"after")); show("empty then 5, recv", rv(c), rv(c))
            p.shutdown(1); show("FIN", c.splice(), ex(c), rv(c))
    with Connection(s) as c:
        h, p = c.by_hand, c.peer.socket
        p.sendall(h.make(23, b"before") + h.make(22, b"\x18\0\0\1\0") + b"".join(Records(c.keys.receiving).make(23, b"x") for _ in range(1)))
        show("keyupdate", c.splice(), c.splice(), ex(c), outcome(lambda: k.receive_record(c.kernel, D)), c.splice(), rv(c), ex(c), c.splice(), outcome(lambda: c.kernel.setsockopt(282, 2, c.keys.receiving.to_crypto_info())))
    with Connection(s) as c:
        c.peer.socket.sendall(b"\x17\x03\x03\x00\x20" + b"z" * 32)
        show("bad", c.splice(), c.splice(), rv(c), ex(c), c.splice(), outcome(lambda: c.kernel.send(b"x")))
    with Connection(s) as c:
        c.peer.socket.sendall(b"\x17\x03\x03\x00\x20" + b"z" * 32)
        show("bad, examine first", ex(c), c.splice(), rv(c), ex(c))
    with Connection(s) as c:
        c.peer.socket.sendall(b"GET / HTTP/1.0\r\n\r\n"); 
        show("http", c.splice(), c.splice(), ex(c), rv(c), c.splice(), ex(c))
    with Connection(s) as c:
        c.peer.socket.sendall(b"GET / HTTP/1.0\r\n\r\n"); 
        show("http ex", ex(c), c.splice(), ex(c))
    with Connection(s) as c:
        c.peer.socket.sendall(b"\x17\x03\x03\xff\xff" + bytes(100)); 
        show("too long", c.splice(), ex(c), c.splice(), ex(c), rv(c))
    with Connection(s) as c:
        c.peer.socket.sendall(b"\x17\x03\x03\x01\x00abc"); c.peer.socket.shutdown(1)
        show("cut record", c.splice(), ex(c), rv(c))
    with Connection(s) as c:
        c.peer.send(b"x" * 1000); c.peer.send(b"y" * 100)
        show("FIONREAD", readable_bytes(c.kernel), c.splice(), readable_bytes(c.kernel))
    a, b = tcp_pair(); a.shutdown(1); b.recv(1); show("attach after FIN", k.attach_tls(b)); a.close(); b.close()
    for size in (0, 4608, 10000, 30000, 70000, 200000):
      for how in ("shutdown", "close", "notify"):
        lost = 0; end = ""
        with Connection(s, send_buffer=size, peer_buffer=40000) as c:
            sent = 0; c.kernel.setblocking(False); n = 0
            while sent < 6_000_000:
                left = os.write(c.pipe.writing, b"z" * 65536)
                while left:
                    got = c.pipe.splice_to(c.kernel, left)
                    if got == "EAGAIN": break
                    left -= got; sent += got
                if left: break
            c.peer.socket.settimeout(1)
            first = None
            got = 0
            if how == "shutdown": c.kernel.shutdown(1)
            elif how == "close": c.kernel.close()
            else: first = k.send_close_notify(c.kernel)
            done = first is not False
            if how == "notify" and done: c.kernel.shutdown(1)
            try:
                while d := c.peer.receive():
                    got += len(d)
                    if not done and select.select([], [c.kernel], [], 0)[1]:
                        if k.send_close_notify(c.kernel): c.kernel.shutdown(1); done = True
                end = c.peer.has_close_notify
            except OSError as e: end = repr(e)
            show("slow", size, how, "sent", sent, "lost", sent - got, "first", first, done, end)
