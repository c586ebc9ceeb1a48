package main

import (
	"crypto/tls"
	"fmt"
	"syscall"
)

const (
	dialsAtOnce            = 32
	connectedBytesMax      = 4096
	firstBackoff           = int64(100e6) // ns, as Pulsar's clients; doubled by each further attempt
	retryTickMs            = 10
	stateDialling     byte = 0
	stateWaiting      byte = 1
	stateReady        byte = 2
)

// client is one connection of a load. Its epoll registration is edge-triggered and never changed while it is opened.
type client struct {
	stream
	state    byte
	held     []byte
	sentAt   int64 // echo: when the message under way was sent
	received int   // echo: of the message under way
	toSend   int   // bulk: before the next acknowledgement is due
	at       int   // bulk: where in the chunk the next byte is
	awaited  int   // bulk: bytes of acknowledgements under way
	backoff  int64 // reconnect: how long to wait after the next attempt that fails
	retryAt  int64 // reconnect: when the next attempt is due
}

// dialer opens connections and brings them to CONNECTED.
type dialer struct {
	poller *poller
	port   int
	tls    *tls.Config
	hello  []byte
	opened int
	byFd   map[int32]*client
	buffer []byte
}

func newDialer(s settings) *dialer {
	return &dialer{
		poller: newPoller(),
		port:   s.port,
		tls:    clientTLS(s.tls),
		hello:  connectFrame(s.target, s.token),
		byFd:   map[int32]*client{},
		buffer: make([]byte, connectedBytesMax),
	}
}

func (d *dialer) open() { d.dial(&client{backoff: firstBackoff}) }

func (d *dialer) dial(c *client) {
	c.stream, c.state, c.held = stream{fd: dial(d.port, d.opened)}, stateDialling, nil
	d.opened++
	d.byFd[int32(c.fd)] = c
	if d.tls != nil {
		c.startTLS(tls.Client, d.tls, d.poller, edgeTriggeredBoth)
		return
	}
	d.poller.add(c.fd, edgeTriggeredBoth)
}

// advance is step where no attempt may fail.
func (d *dialer) advance(c *client, events uint32) bool {
	failure := d.step(c, events)
	if failure != "" {
		die("%s", failure)
	}
	return c.state == stateReady
}

// step takes the next step of a connection that is being opened, and says why it failed, if it did.
func (d *dialer) step(c *client, events uint32) string {
	if events&(syscall.EPOLLERR|syscall.EPOLLHUP) != 0 {
		return "a connection was refused or reset"
	}
	if c.state == stateDialling && events&syscall.EPOLLOUT != 0 {
		if n, err := c.write(d.hello); err != nil || n != len(d.hello) {
			return fmt.Sprintf("a socket took only %d bytes of CONNECT: %v", n, err)
		}
		userTimeout(c.fd, 0)
		c.state = stateWaiting
	}
	if c.state == stateDialling || events&syscall.EPOLLIN == 0 {
		return ""
	}
	n := c.read(d.buffer)
	if n == 0 {
		return "a connection was closed"
	}
	c.held = append(c.held, d.buffer[:atLeast0(n)]...)
	base, rest, whole := nextFrame(c.held)
	if !whole {
		return ""
	}
	if kind, _ := field(base, 1); kind != typeConnected || c.state == stateReady || len(rest) != 0 {
		return fmt.Sprintf("instead of CONNECTED came a command of type %d", kind)
	}
	if c.state, c.held = stateReady, nil; c.tls != nil {
		negotiated = tls.CipherSuiteName(c.tls.ConnectionState().CipherSuite)
	}
	return ""
}

func (d *dialer) close(c *client) {
	delete(d.byFd, int32(c.fd))
	c.stream.close()
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

// resetAll cuts all connections.
func (d *dialer) resetAll() {
	for _, c := range d.byFd {
		resetAtClose(c.fd)
		d.close(c)
	}
}

// openAtOnce opens so many connections, none of which waits for another. Those that fail, or are cut before the last is
// there, try again as Pulsar's clients do. Latencies are from since on.
func (d *dialer) openAtOnce(count int, since int64, r *result) {
	for i := 0; i < count; i++ {
		d.open()
	}
	var failed []*client
	for ready := 0; ready < count; {
		timeoutMs := stalledMs
		if len(failed) > 0 {
			timeoutMs = retryTickMs
		}
		events := d.poller.wait(timeoutMs)
		if len(events) == 0 && len(failed) == 0 {
			die("%d of %d are not back, and nothing has moved for %d s", count-ready, count, stalledMs/1000)
		}
		now := monotonic()
		for _, event := range events {
			c := d.byFd[event.Fd]
			was := c.state
			if failure := d.step(c, event.Events); failure != "" {
				if was == stateReady {
					ready--
					r.Operations--
				}
				d.close(c)
				c.retryAt = now + c.backoff
				c.backoff *= 2
				r.Retries++
				failed = append(failed, c)
			} else if was != stateReady && c.state == stateReady {
				ready++
				r.Operations++
				r.latencies = append(r.latencies, now-since)
			}
		}
		// Only now, since a file descriptor that is used again must not meet an event of its former owner.
		rest := failed[:0]
		for _, c := range failed {
			if c.retryAt <= now {
				d.dial(c)
			} else {
				rest = append(rest, c)
			}
		}
		failed = rest
	}
}
