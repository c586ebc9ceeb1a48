package main

import (
	"fmt"
	"syscall"
)

// What a client asks for, after CONNECTED, by the one byte of a frame of typeMode.
const (
	modeEcho = 'E'
	modeSink = 'S'

	bufferBytes = 1 << 20
	// acknowledgedBytes is after how many bytes a sink says one frame. Seldom, since that is traffic of its own.
	acknowledgedBytes = 4 << 20
)

// acknowledgement is a frame, as all that goes over a connection here: some proxies follow frames.
var acknowledgement = fillerFrame(4 * sizeBytes)

// peer is one connection to the broker.
type peer struct {
	fd       int
	mode     byte   // 0: it speaks in frames
	held     []byte // a frame that is not whole yet
	consumed int    // by a sink, since it last acknowledged
}

type broker struct {
	poller   *poller
	listener int
	url      string
	peers    map[int32]*peer
	buffer   []byte
}

func runBroker(s settings) {
	b := &broker{
		poller:   newPoller(),
		listener: listen(s.port),
		url:      fmt.Sprintf("pulsar://127.0.0.1:%d", s.port),
		peers:    map[int32]*peer{},
		buffer:   make([]byte, bufferBytes),
	}
	b.poller.add(b.listener, syscall.EPOLLIN)
	for {
		for _, event := range b.poller.wait(waitForeverMs) {
			if int(event.Fd) == b.listener {
				b.accept()
			} else if p := b.peers[event.Fd]; p != nil && !b.serve(p) {
				delete(b.peers, event.Fd)
				_ = syscall.Close(p.fd)
			}
		}
	}
}

func (b *broker) accept() {
	for {
		fd, _, err := syscall.Accept4(b.listener, nonBlocking)
		if err == syscall.EAGAIN || err == syscall.ECONNABORTED {
			return
		}
		check("accept", err)
		noDelay(fd)
		b.peers[int32(fd)] = &peer{fd: fd}
		b.poller.add(fd, syscall.EPOLLIN)
	}
}

// serve reads once; false where the connection has ended.
func (b *broker) serve(p *peer) bool {
	if p.mode == modeSink {
		n := discard(p.fd, b.buffer)
		p.consume(atLeast0(n))
		return n != 0
	}
	n := read(p.fd, b.buffer)
	if n <= 0 {
		return n < 0
	}
	data := b.buffer[:n]
	if p.mode == 0 {
		data = b.speak(p, data)
	}
	switch p.mode {
	case modeEcho:
		if len(data) > 0 {
			return answer(p.fd, data)
		}
	case modeSink:
		p.consume(len(data))
	}
	return true
}

// speak answers frames until none is whole or a mode is asked for; what follows that belongs to the mode.
func (b *broker) speak(p *peer, data []byte) []byte {
	if len(p.held) > 0 {
		data, p.held = append(p.held, data...), nil
	}
	var answers []byte
	for len(data) > 0 {
		base, rest, whole := nextFrame(data)
		if !whole {
			p.held = append([]byte(nil), data...)
			data = nil
			break
		}
		data = rest
		if kind, _ := field(base, 1); kind == typeMode {
			_, mode := field(base, typeMode)
			p.mode = mode[0]
			break
		}
		answers = append(answers, b.reply(base)...)
	}
	if len(answers) > 0 {
		answer(p.fd, answers)
	}
	return data
}

func (b *broker) reply(base []byte) []byte {
	kind, _ := field(base, 1)
	switch kind {
	case typeConnect:
		return connectedFrame()
	case typePing:
		return pongFrame()
	case typeLookup:
		_, lookup := field(base, typeLookup)
		requestID, _ := field(lookup, 2)
		return lookupResponseFrame(b.url, requestID)
	case typePong:
		return nil
	}
	die("the broker was sent a command of type %d", kind)
	return nil
}

func (p *peer) consume(n int) {
	for p.consumed += n; p.consumed >= acknowledgedBytes; p.consumed -= acknowledgedBytes {
		answer(p.fd, acknowledgement)
	}
}

// answer is false where the peer has gone; that it does not take what it asked for would be a fault.
func answer(fd int, data []byte) bool {
	n, err := write(fd, data)
	if err == syscall.ECONNRESET || err == syscall.EPIPE {
		return false
	}
	check("send", err)
	if n != len(data) {
		die("a peer took only %d of %d bytes", n, len(data))
	}
	return true
}
