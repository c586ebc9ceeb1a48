package main

import "syscall"

const (
	messageBytes = 100
	chunkBytes   = 256 << 10
	topic        = "persistent://public/default/bench"
	answersBytes = 64 << 10
)

// runEcho: each connection sends a message and waits until all of it has come back.
func runEcho(s settings) {
	d := newDialer(s)
	clients := d.openAll(s.connections)
	for _, c := range clients {
		writeAll(c.fd, []byte{modeEcho})
	}
	out, in := make([]byte, messageBytes), make([]byte, messageBytes)
	send := func(c *client, now int64) {
		c.sentAt, c.received = now, 0
		writeAll(c.fd, out)
	}
	measure(s, func(deadline int64, r *result) {
		for _, c := range clients {
			send(c, monotonic())
		}
		for waiting := len(clients); waiting > 0; {
			for _, event := range d.poller.waitOrDie() {
				c := d.byFd[event.Fd]
				n := read(c.fd, in)
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
				if now < deadline {
					send(c, now)
				} else {
					waiting--
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
		writeAll(c.fd, []byte{modeSink})
		d.poller.change(c.fd, syscall.EPOLLIN) // level-triggered: a portion a turn, so that all get theirs
	}
	chunk := make([]byte, chunkBytes)
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
					n, err := write(c.fd, chunk[:atMostChunk(c.toSend)])
					check("send", err)
					c.toSend -= n
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

func atMostChunk(n int) int {
	if n > chunkBytes {
		return chunkBytes
	}
	return n
}

func (c *client) beginBlock(d *dialer) {
	if c.toSend == 0 && c.awaited == 0 {
		d.poller.change(c.fd, syscall.EPOLLIN|syscall.EPOLLOUT)
	}
	c.toSend = acknowledgedBytes
	c.awaited++
}

func (c *client) countAcknowledged(r *result) {
	var acknowledgements [64]byte
	n := read(c.fd, acknowledgements[:])
	if n == 0 {
		die("a bulk transfer was cut")
	}
	n = atLeast0(n)
	c.awaited -= n
	r.Operations += int64(n)
	r.Bytes += int64(n) * acknowledgedBytes
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
				d.close(c)
				r.Operations++
				if monotonic() < deadline {
					d.open()
				}
			}
		}
	})
}

// runLookups: one connection in lookup mode with so many requests under way.
func runLookups(s settings) {
	window := s.connections
	s.target = ""
	d := newDialer(s)
	c := d.openAll(1)[0]
	var asked uint64
	ask := func(count int) {
		var batch []byte
		for ; count > 0; count-- {
			batch = append(batch, lookupFrame(topic, asked)...)
			asked++
		}
		writeAll(c.fd, batch)
	}
	buffer := make([]byte, answersBytes)
	measure(s, func(deadline int64, r *result) {
		held := 0
		ask(window)
		for waiting := window; waiting > 0; {
			d.poller.waitOrDie()
			n := read(c.fd, buffer[held:])
			if n == 0 {
				die("the connection for lookups was cut")
			}
			answers, rest := countAnswers(buffer[:held+atLeast0(n)])
			held = copy(buffer, rest)
			r.Operations += int64(answers)
			if answers > 0 && monotonic() < deadline {
				ask(answers)
			} else {
				waiting -= answers
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
		writeAll(c.fd, []byte{modeEcho})
	}
	await("{}")
}
