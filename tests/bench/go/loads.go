package main

import (
	"bytes"
	"strconv"
	"syscall"
)

const (
	messageBytes = 100
	chunkBytes   = 256 << 10
	topic        = "persistent://public/default/bench-"
	freshLookups = 10
	answersBytes = 64 << 10
	// blocksUnderWay are asked for by each connection that receives in bulk.
	blocksUnderWay = 2
)

// runEcho: each connection sends a message and waits until all of it has come back; with an interval it then waits until
// its next message is due.
func runEcho(s settings) {
	d := newDialer(s)
	clients := d.openAll(s.connections)
	for _, c := range clients {
		c.writeAll(modeFrame(modeEcho))
	}
	out, in := fillerFrame(messageBytes), make([]byte, messageBytes)
	send := func(c *client, now int64) {
		c.sentAt, c.received = now, 0
		c.writeAll(out)
	}
	measure(s, func(deadline int64, r *result) {
		var resting []*client // in the order in which they are due
		waiting := len(clients)
		for i, c := range clients {
			c.sentAt = monotonic() - int64(s.interval) + int64(s.interval)*int64(i)/int64(len(clients))
			resting = append(resting, c)
		}
		for waiting > 0 {
			now := monotonic()
			for len(resting) > 0 && resting[0].sentAt+int64(s.interval) <= now {
				send(resting[0], now)
				resting = resting[1:]
			}
			timeoutMs := stalledMs
			if len(resting) > 0 {
				timeoutMs = 1
			}
			events := d.poller.wait(timeoutMs)
			if len(events) == 0 && len(resting) == 0 {
				die("nothing has moved for %d s", stalledMs/1000)
			}
			for _, event := range events {
				c := d.byFd[event.Fd]
				n := c.read(in)
				if n == 0 {
					die("an echo was cut")
				}
				if c.received += atLeast0(n); c.received < messageBytes || n < 0 {
					continue
				}
				now := monotonic()
				r.Operations++
				r.Bytes += messageBytes
				r.latencies = append(r.latencies, now-c.sentAt)
				if now >= deadline {
					waiting--
				} else if s.interval == 0 {
					send(c, now)
				} else {
					resting = append(resting, c)
				}
			}
		}
	})
}

// runBulk: each connection sends as fast as it can; what counts is what the broker says has arrived.
func runBulk(s settings) {
	d := newDialer(s)
	clients := d.openAll(s.connections)
	for _, c := range clients {
		c.writeAll(modeFrame(modeSink))
		d.poller.change(c.fd, syscall.EPOLLIN) // level-triggered: a portion a turn, so that all get theirs
	}
	chunk := bytes.Repeat(fillerFrame(s.frame), max1(chunkBytes/s.frame))
	measure(s, func(deadline int64, r *result) {
		for _, c := range clients {
			c.beginBlock(d)
		}
		for sending := len(clients); sending > 0; {
			for _, event := range d.poller.waitOrDie() {
				c := d.byFd[event.Fd]
				if event.Events&syscall.EPOLLIN != 0 {
					c.countAcknowledged(r)
				}
				if event.Events&syscall.EPOLLOUT != 0 && c.toSend > 0 {
					n, err := c.write(c.next(chunk))
					check("send", err)
					c.toSend -= n
					c.at = (c.at + n) % len(chunk)
					if c.toSend == 0 && monotonic() < deadline {
						c.beginBlock(d)
					} else if c.toSend == 0 {
						d.poller.change(c.fd, syscall.EPOLLIN)
					}
				}
				if c.toSend == 0 && c.awaited == 0 {
					sending--
				}
			}
		}
	})
}

func max1(n int) int {
	if n < 1 {
		return 1
	}
	return n
}

// next is what is to be sent now: blocks end where they end, frames go on in the next one.
func (c *client) next(chunk []byte) []byte {
	if rest := chunk[c.at:]; len(rest) <= c.toSend {
		return rest
	}
	return chunk[c.at : c.at+c.toSend]
}

func (c *client) beginBlock(d *dialer) {
	if c.toSend == 0 && c.awaited == 0 {
		d.poller.change(c.fd, syscall.EPOLLIN|syscall.EPOLLOUT)
	}
	c.toSend = acknowledgedBytes
	c.awaited += len(acknowledgement)
}

func (c *client) countAcknowledged(r *result) {
	var acknowledgements [512]byte
	n := c.read(acknowledgements[:])
	if n == 0 {
		die("a bulk transfer was cut")
	}
	n = atLeast0(n)
	c.awaited -= n
	c.received += n
	whole := c.received / len(acknowledgement)
	c.received %= len(acknowledgement)
	r.Operations += int64(whole)
	r.Bytes += int64(whole) * acknowledgedBytes
}

// runBulkDown: each connection asks for blocks, with some under way, and discards them.
func runBulkDown(s settings) {
	d := newDialer(s)
	clients := d.openAll(s.connections)
	for _, c := range clients {
		c.writeAll(modeFrame(modeSource))
	}
	buffer := make([]byte, bufferBytes)
	ask := func(c *client) {
		c.writeAll(acknowledgement)
		c.awaited += acknowledgedBytes
	}
	measure(s, func(deadline int64, r *result) {
		for _, c := range clients {
			for i := 0; i < blocksUnderWay; i++ {
				ask(c)
			}
		}
		for waiting := len(clients); waiting > 0; {
			for _, event := range d.poller.waitOrDie() {
				c := d.byFd[event.Fd]
				n := c.discard(buffer)
				for ; n > 0; n = c.discard(buffer) {
					c.received += n
					c.awaited -= n
				}
				if n == 0 {
					die("a bulk transfer was cut")
				}
				for ; c.received >= acknowledgedBytes; c.received -= acknowledgedBytes {
					r.Operations++
					r.Bytes += acknowledgedBytes
					if monotonic() < deadline {
						ask(c)
					} else if c.awaited == 0 {
						waiting--
						c.received = 0
						break
					}
				}
			}
		}
	})
}

// runConnects: so many at a time are opened, told CONNECTED, and closed.
func runConnects(s settings) {
	d := newDialer(s)
	measure(s, func(deadline int64, r *result) {
		for i := 0; i < s.connections; i++ {
			d.open()
		}
		for len(d.byFd) > 0 {
			for _, event := range d.poller.waitOrDie() {
				c := d.byFd[event.Fd]
				if c == nil || !d.advance(c, event.Events) {
					continue
				}
				if c.tls != nil && c.tls.ConnectionState().DidResume {
					r.Resumed++
				}
				d.close(c)
				r.Operations++
				if monotonic() < deadline {
					d.open()
				}
			}
		}
	})
}

// runReconnects: so many relays are cut at once, as by a load balancer that restarts, and come back at once.
func runReconnects(s settings) {
	d := newDialer(s)
	d.openAll(s.connections)
	measure(s, func(deadline int64, r *result) {
		for again := true; again; again = monotonic() < deadline {
			cutAt := monotonic()
			d.resetAll()
			d.openAtOnce(s.connections, cutAt, r)
		}
	})
}

// lookupConn is a connection in lookup mode. Each request is for another topic, so that no answer serves two.
type lookupConn struct {
	client *client
	asked  uint64
	held   int
	buffer []byte
}

func (a *lookupConn) sendLookups(count int) {
	var batch []byte
	for ; count > 0; count-- {
		name := strconv.AppendUint([]byte(topic), uint64(a.client.fd)<<32|a.asked, 10)
		batch = append(batch, lookupFrame(name, a.asked)...)
		a.asked++
	}
	a.client.writeAll(batch)
}

// answers counts those that have come.
func (a *lookupConn) answers() int {
	n := a.client.read(a.buffer[a.held:])
	if n == 0 {
		die("a connection for lookups was cut")
	}
	count, rest := countAnswers(a.buffer[:a.held+atLeast0(n)])
	a.held = copy(a.buffer, rest)
	return count
}

func newLookupConn(c *client) *lookupConn {
	return &lookupConn{client: c, buffer: make([]byte, answersBytes)}
}

// runLookups: connections in lookup mode, each with so many requests under way.
func runLookups(s settings) {
	s.target = ""
	d := newDialer(s)
	lookupConns := map[int32]*lookupConn{}
	for _, c := range d.openAll(s.connections) {
		lookupConns[int32(c.fd)] = newLookupConn(c)
	}
	measure(s, func(deadline int64, r *result) {
		for _, a := range lookupConns {
			a.sendLookups(s.underWay)
		}
		for waiting := len(lookupConns) * s.underWay; waiting > 0; {
			for _, event := range d.poller.waitOrDie() {
				a := lookupConns[event.Fd]
				for {
					answers := a.answers()
					if answers == 0 {
						break
					}
					r.Operations += int64(answers)
					if monotonic() < deadline {
						a.sendLookups(answers)
					} else {
						waiting -= answers
					}
				}
			}
		}
	})
}

// runFresh: so many at a time connect, do ten lookups one after the other, and close; a lookup is an operation.
func runFresh(s settings) {
	s.target = ""
	d := newDialer(s)
	lookupConns := map[int32]*lookupConn{}
	measure(s, func(deadline int64, r *result) {
		for i := 0; i < s.connections; i++ {
			d.open()
		}
		for len(d.byFd) > 0 {
			for _, event := range d.poller.waitOrDie() {
				c := d.byFd[event.Fd]
				if c == nil {
					continue
				}
				if c.state != stateReady {
					if d.advance(c, event.Events) {
						lookupConns[event.Fd] = newLookupConn(c)
						lookupConns[event.Fd].sendLookups(1)
					}
					continue
				}
				a := lookupConns[event.Fd]
				answers := a.answers()
				r.Operations += int64(answers)
				if answers == 0 {
					continue
				}
				if a.asked < freshLookups {
					a.sendLookups(1)
					continue
				}
				delete(lookupConns, event.Fd)
				d.close(c)
				if monotonic() < deadline {
					d.open()
				}
			}
		}
	})
}

func countAnswers(data []byte) (int, []byte) {
	for count := 0; ; count++ {
		base, rest, whole := nextFrame(data)
		if !whole {
			return count, data
		}
		_, answer := field(base, typeLookupResponse)
		if response, _ := field(answer, 3); response != lookupConnect {
			die("a lookup was not answered with a broker: %x", base)
		}
		data = rest
	}
}

// runIdle: so many relays are opened and kept.
func runIdle(s settings) {
	await("ready")
	d := newDialer(s)
	clients := d.openAll(s.connections)
	for _, c := range clients {
		c.writeAll(modeFrame(modeEcho))
	}
	await("{}")
}
