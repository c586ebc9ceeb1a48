package main

import (
	"bytes"
	"fmt"
	"strconv"
	"syscall"
	"time"
)

// Both ends of the HTTP rows. A GET of httpPath and a number is answered with so many bytes, a PUT with 204 once its
// body is there. Heads are read only as far as these two ends need it: bodies have lengths, and lines end in CRLF.

const (
	httpPath      = "/admin/v2/bench/"
	httpHeadMax   = 16 << 10
	continueHead  = "HTTP/1.1 100 Continue\r\n\r\n"
	noContentHead = "HTTP/1.1 204 No Content\r\n\r\n"
	okHead        = "HTTP/1.1 200 OK\r\nDate: %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)

var blankLine = []byte("\r\n\r\n")

// incoming is what comes on a connection: heads, and bodies that are discarded.
type incoming struct {
	held  []byte // of a head that is not whole yet
	left  int    // of the body under way
	begun bool   // the head of the message under way was there
}

// receive reads once. With a head it calls begin, which says how long the body is; true where a message has ended.
func (m *incoming) receive(s *stream, buffer []byte, begin func(head []byte) int) (ended, cut bool) {
	if m.begun && m.left > 0 {
		n := s.discard(buffer[:min(len(buffer), m.left)])
		m.left -= atLeast0(n)
		return m.end(), n == 0
	}
	n := s.read(buffer[:httpHeadMax])
	if n <= 0 {
		return false, n == 0
	}
	data := buffer[:n]
	if len(m.held) > 0 {
		m.held = append(m.held, data...)
		data = m.held
	}
	end := bytes.Index(data, blankLine)
	if end < 0 {
		m.held = append(m.held[:0], data...)
		return false, false
	}
	end += len(blankLine)
	m.left, m.begun, m.held = begin(data[:end]), true, m.held[:0]
	if m.left -= len(data) - end; m.left < 0 {
		die("more came than one message:\n%s", data)
	}
	return m.end(), false
}

func (m *incoming) end() bool {
	if m.left > 0 {
		return false
	}
	m.begun = false
	return true
}

// headValue is a header's value; the name in lower case.
func headValue(head []byte, name string) string {
	for _, line := range bytes.Split(head, []byte("\r\n")) {
		if len(line) > len(name) && line[len(name)] == ':' && bytes.EqualFold(line[:len(name)], []byte(name)) {
			return string(bytes.TrimSpace(line[len(name)+1:]))
		}
	}
	return ""
}

func bodyLength(head []byte) int {
	text := headValue(head, "content-length")
	length, err := strconv.Atoi(text)
	if err != nil && (text != "" || headValue(head, "transfer-encoding") != "") {
		die("a body without a length:\n%s", head)
	}
	return length
}

// ---- the server

type httpPeer struct {
	stream
	incoming
	asked  int // bytes of the answer's body
	isPut  bool
	toSend int
}

type httpServer struct {
	poller *poller
	second int64
	small  map[int][]byte // whole answers of this second: as Jetty's they have a date
	buffer []byte
}

// runHTTPServer is the broker's web port.
func runHTTPServer(s settings) {
	server := &httpServer{newPoller(), 0, map[int][]byte{}, make([]byte, bufferBytes)}
	listener, peers := listen(s.port), map[int32]*httpPeer{}
	server.poller.add(listener, syscall.EPOLLIN)
	for {
		for _, event := range server.poller.wait(waitForeverMs) {
			if int(event.Fd) == listener {
				fd, _, err := syscall.Accept4(listener, nonBlocking)
				if err == nil {
					noDelay(fd)
					peers[int32(fd)] = &httpPeer{stream: stream{fd: fd}}
					server.poller.add(fd, syscall.EPOLLIN)
				}
			} else if p := peers[event.Fd]; p != nil && !server.serve(p, event.Events) {
				delete(peers, event.Fd)
				p.close()
			}
		}
	}
}

// serve is false where the connection has ended.
func (h *httpServer) serve(p *httpPeer, events uint32) bool {
	if events&syscall.EPOLLOUT != 0 {
		n, err := p.write(sourceChunk[:min(len(sourceChunk), p.toSend)])
		if gone(err) {
			return false
		}
		if p.toSend -= n; p.toSend == 0 {
			h.poller.change(p.fd, syscall.EPOLLIN)
		}
	}
	ended, cut := p.receive(&p.stream, h.buffer, p.begin)
	if cut || !ended {
		return !cut
	}
	return h.answer(p)
}

func (p *httpPeer) begin(head []byte) int {
	p.isPut = bytes.HasPrefix(head, []byte("PUT "))
	if p.isPut {
		if headValue(head, "expect") != "" && gone(p.writeAll([]byte(continueHead))) {
			return 0
		}
		return bodyLength(head)
	}
	target := head[:bytes.Index(head, []byte(" HTTP/"))]
	asked, err := strconv.Atoi(string(target[bytes.LastIndexByte(target, '/')+1:]))
	if err != nil {
		die("a request for something else:\n%s", head)
	}
	p.asked = asked
	return 0
}

func (h *httpServer) answer(p *httpPeer) bool {
	if p.isPut {
		return !gone(p.writeAll([]byte(noContentHead)))
	}
	if p.asked > chunkBytes {
		if gone(p.writeAll([]byte(fmt.Sprintf(okHead, date(), p.asked)))) {
			return false
		}
		p.toSend = p.asked
		h.poller.change(p.fd, syscall.EPOLLIN|syscall.EPOLLOUT)
		return true
	}
	if now := monotonic() / 1e9; now != h.second {
		h.second, h.small = now, map[int][]byte{}
	}
	whole := h.small[p.asked]
	if whole == nil {
		whole = append([]byte(fmt.Sprintf(okHead, date(), p.asked)), bytes.Repeat([]byte("x"), p.asked)...)
		h.small[p.asked] = whole
	}
	return !gone(p.writeAll(whole))
}

func date() string { return time.Now().UTC().Format("Mon, 02 Jan 2006 15:04:05 GMT") }

// writeAll is for what a socket has room for.
func (p *httpPeer) writeAll(data []byte) error {
	n, err := p.write(data)
	if err == nil && n != len(data) {
		die("a peer took only %d of %d bytes", n, len(data))
	}
	return err
}

// ---- the load

type httpClient struct {
	client
	incoming
}

func openHTTP(s settings, p *poller) map[int32]*httpClient {
	clients := map[int32]*httpClient{}
	for i := 0; i < s.connections; i++ {
		fd := dial(s.port, i)
		clients[int32(fd)] = &httpClient{client: client{stream: stream{fd: fd}}}
		p.add(fd, syscall.EPOLLOUT)
	}
	for open := 0; open < len(clients); {
		for _, event := range p.waitOrDie() {
			if event.Events&(syscall.EPOLLERR|syscall.EPOLLHUP) != 0 {
				die("a connection was refused or reset")
			}
			userTimeout(int(event.Fd), 0)
			p.change(int(event.Fd), syscall.EPOLLIN)
			open++
		}
	}
	return clients
}

func httpRequest(s settings, method string, more string) []byte {
	if s.token != "" {
		more += "Authorization: Bearer " + s.token + "\r\n"
	}
	// What Pulsar's admin client sends of headers.
	return []byte(fmt.Sprintf("%s %s%d HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nAccept: application/json\r\n"+
		"User-Agent: Pulsar-Java-v4.0.8\r\n%s\r\n", method, httpPath, s.frame, s.port, more))
}

// runHTTPGet: each connection asks for a body of so many bytes, and asks again once it is there.
func runHTTPGet(s settings) {
	request := httpRequest(s, "GET", "")
	runHTTP(s, "200", func(c *httpClient) { c.writeAll(request) }, nil)
}

// runHTTPPut: each connection sends a body of so many bytes, and again once that was answered.
func runHTTPPut(s settings) {
	request := httpRequest(s, "PUT", fmt.Sprintf("Content-Length: %d\r\n", s.frame))
	body := bytes.Repeat([]byte("x"), bufferBytes)
	begin := func(c *httpClient) {
		c.writeAll(request)
		c.toSend = s.frame
	}
	runHTTP(s, "204", begin, func(c *httpClient) {
		n, err := c.write(body[:min(len(body), c.toSend)])
		check("send", err)
		c.toSend -= n
	})
}

func runHTTP(s settings, status string, begin, send func(*httpClient)) {
	poller := newPoller()
	clients := openHTTP(s, poller)
	buffer := make([]byte, bufferBytes)
	begins := func(head []byte) int {
		if !bytes.HasPrefix(head[len("HTTP/1.1 "):], []byte(status)) {
			die("an answer that is not %s:\n%s", status, head)
		}
		return bodyLength(head)
	}
	start := func(c *httpClient) {
		c.sentAt = monotonic()
		begin(c)
		if c.toSend > 0 {
			poller.change(c.fd, syscall.EPOLLIN|syscall.EPOLLOUT)
		}
	}
	measure(s, func(deadline int64, r *result) {
		waiting := len(clients)
		for _, c := range clients {
			start(c)
		}
		for waiting > 0 {
			for _, event := range poller.waitOrDie() {
				c := clients[event.Fd]
				if event.Events&syscall.EPOLLOUT != 0 && c.toSend > 0 {
					if send(c); c.toSend == 0 {
						poller.change(c.fd, syscall.EPOLLIN)
					}
				}
				if event.Events&^syscall.EPOLLOUT == 0 {
					continue
				}
				ended, cut := c.receive(&c.stream, buffer, begins)
				if cut || ended && c.toSend > 0 {
					die("a request was not answered properly")
				}
				if !ended {
					continue
				}
				now := monotonic()
				r.Operations++
				r.Bytes += int64(s.frame)
				r.latencies = append(r.latencies, now-c.sentAt)
				if now < deadline {
					start(c)
				} else {
					waiting--
				}
			}
		}
	})
}

func min(a, b int) int {
	if a < b {
		return a
	}
	return b
}
