package main

import "syscall"

const (
	dialsAtOnce            = 32
	connectedBytesMax      = 4096
	stateDialling     byte = 0
	stateWaiting      byte = 1
	stateReady        byte = 2
)

// client is one connection of a load. Its epoll registration is edge-triggered and never changed while it is opened.
type client struct {
	fd       int
	state    byte
	held     []byte
	sentAt   int64 // echo: when the message under way was sent
	received int   // echo: of the message under way
	toSend   int   // bulk: before the next acknowledgement is due
	at       int   // bulk: where in the chunk the next byte is
	awaited  int   // bulk: bytes of acknowledgements under way
}

// dialer opens connections and brings them to CONNECTED.
type dialer struct {
	poller *poller
	port   int
	hello  []byte
	opened int
	byFd   map[int32]*client
	buffer []byte
}

func newDialer(s settings) *dialer {
	return &dialer{
		poller: newPoller(),
		port:   s.port,
		hello:  connectFrame(s.target, s.token),
		byFd:   map[int32]*client{},
		buffer: make([]byte, connectedBytesMax),
	}
}

func (d *dialer) open() {
	fd := dial(d.port, d.opened)
	d.opened++
	d.byFd[int32(fd)] = &client{fd: fd}
	d.poller.add(fd, edgeTriggeredBoth)
}

// advance takes the next step of a connection that is being opened; true when it has been told CONNECTED.
func (d *dialer) advance(c *client, events uint32) bool {
	if c.state == stateDialling && events&syscall.EPOLLOUT != 0 {
		writeAll(c.fd, d.hello)
		c.state = stateWaiting
	}
	if events&(syscall.EPOLLERR|syscall.EPOLLHUP) != 0 {
		die("a connection was refused or reset before CONNECTED")
	}
	if c.state != stateWaiting || events&syscall.EPOLLIN == 0 {
		return false
	}
	n := read(c.fd, d.buffer)
	if n == 0 {
		die("a connection was closed before CONNECTED")
	}
	c.held = append(c.held, d.buffer[:atLeast0(n)]...)
	base, rest, whole := nextFrame(c.held)
	if !whole {
		return false
	}
	if kind, _ := field(base, 1); kind != typeConnected || len(rest) != 0 {
		die("instead of CONNECTED came a command of type %d", kind)
	}
	c.state, c.held = stateReady, nil
	return true
}

func (d *dialer) close(c *client) {
	delete(d.byFd, int32(c.fd))
	_ = syscall.Close(c.fd)
}

// openAll opens so many connections and gives them when all are ready.
func (d *dialer) openAll(count int) []*client {
	ready := make([]*client, 0, count)
	for len(ready) < count {
		for d.opened < count && d.opened-len(ready) < dialsAtOnce {
			d.open()
		}
		for _, event := range d.poller.waitOrDie() {
			if c := d.byFd[event.Fd]; c.state != stateReady && d.advance(c, event.Events) {
				ready = append(ready, c)
			}
		}
	}
	return ready
}
