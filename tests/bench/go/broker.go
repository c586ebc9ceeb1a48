package main

import (
	"crypto/tls"
	"fmt"
	"syscall"
)

// What a client asks for, after CONNECTED, by the one byte of a frame of typeMode.
const (
	modeEcho   = 'E'
	modeSink   = 'S'
	modeSource = 'Q' // for each acknowledgement, a block of as many bytes as a sink acknowledges

	bufferBytes = 1 << 20
	// acknowledgedBytes is after how many bytes a sink says one frame. Seldom, since that is traffic of its own.
	acknowledgedBytes = 4 << 20
)

// acknowledgement is a frame, as all that goes over a connection here: some proxies follow frames.
var acknowledgement = fillerFrame(4 * sizeBytes)

// peer is one connection to the broker.
type peer struct {
	stream
	mode     byte   // 0: it speaks in frames
	held     []byte // a frame that is not whole yet
	consumed int    // by a sink, since it last acknowledged; by a source, of the next request
	toSend   int    // by a source
}

// sourceChunk is what a source sends, again and again; blocks are multiples of it.
var sourceChunk = fillerFrame(chunkBytes)

type broker struct {
	poller   *poller
	listener int
	tls      *tls.Config
	url      string
	peers    map[int32]*peer
	buffer   []byte
}

func runBroker(s settings) {
	b := &broker{
		poller:   newPoller(),
		listener: listen(s.port),
		tls:      serverTLS(s.certificate, s.key),
		url:      fmt.Sprintf("pulsar://127.0.0.1:%d", s.port),
		peers:    map[int32]*peer{},
		buffer:   make([]byte, bufferBytes),
	}
	b.poller.add(b.listener, syscall.EPOLLIN)
	for {
		for _, event := range b.poller.wait(waitForeverMs) {
			if int(event.Fd) == b.listener {
				b.accept()
			} else if p := b.peers[event.Fd]; p != nil && !b.serve(p, event.Events) {
				delete(b.peers, event.Fd)
				p.close()
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
		p := &peer{stream: stream{fd: fd}}
		b.peers[int32(fd)] = p
		if b.tls != nil {
			p.startTLS(tls.Server, b.tls, b.poller, syscall.EPOLLIN)
		} else {
			b.poller.add(fd, syscall.EPOLLIN)
		}
	}
}

// serve sends once, if there is something to send, and reads once, in TLS all there is: its buffers cause no events.
// False where the connection has ended.
func (b *broker) serve(p *peer, events uint32) bool {
	if events&syscall.EPOLLOUT != 0 && !b.sendOn(p) {
		return false
	}
	n := b.receive(p)
	for n > 0 && p.tls != nil {
		n = b.receive(p)
	}
	return n != 0
}

// sendOn sends a portion of what a source has to send; false where the peer has gone.
func (b *broker) sendOn(p *peer) bool {
	if p.toSend > 0 {
		n, err := p.write(sourceChunk[(acknowledgedBytes-p.toSend%acknowledgedBytes)%chunkBytes:])
		if gone(err) {
			return false
		}
		p.toSend -= n
	}
	if p.toSend == 0 {
		b.poller.change(p.fd, syscall.EPOLLIN)
	}
	return true
}

// receive gives what read gives; 0 also where the peer has gone.
func (b *broker) receive(p *peer) int {
	if p.mode == modeSink {
		n := p.discard(b.buffer)
		p.consume(atLeast0(n))
		return n
	}
	n := p.read(b.buffer)
	if n <= 0 {
		return n
	}
	data := b.buffer[:n]
	if p.mode == 0 {
		data = b.speak(p, data)
	}
	switch p.mode {
	case modeEcho:
		if len(data) > 0 {
			if !p.answer(data) {
				return 0
			}
		}
	case modeSink:
		p.consume(len(data))
	case modeSource:
		for p.consumed += len(data); p.consumed >= len(acknowledgement); p.consumed -= len(acknowledgement) {
			p.toSend += acknowledgedBytes
			b.poller.change(p.fd, syscall.EPOLLIN|syscall.EPOLLOUT)
		}
	}
	return n
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
		p.answer(answers)
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
		p.answer(acknowledgement)
	}
}

// answer is false where the peer has gone; that it does not take what it asked for would be a fault.
func (p *peer) answer(data []byte) bool {
	n, err := p.write(data)
	if gone(err) {
		return false
	}
	if n != len(data) {
		die("a peer took only %d of %d bytes", n, len(data))
	}
	return true
}

func gone(err error) bool {
	if err == syscall.ECONNRESET || err == syscall.EPIPE {
		return true
	}
	check("send", err)
	return false
}
