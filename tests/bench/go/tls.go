package main

import (
	"bufio"
	"crypto/tls"
	"io"
	"net"
	"runtime"
	"syscall"
	"time"
	"unsafe"
)

const (
	// handshakesAtOnce is above what a load opens at a time: each handshake is a goroutine that blocks its thread.
	handshakesAtOnce = 64
	tlsReadBytes     = 32 << 10
	tlsWriteBytes    = 64 << 10 // four records: a socket that can be written to has room for them
	sessionsMax      = 64
	tlsFull          = "full"
	tlsResumed       = "resumed"
)

// negotiated is the cipher suite of the last handshake.
var negotiated string

// stream is one connection's bytes. The handshake of TLS has a thread of its own; what comes after it has not.
type stream struct {
	fd  int
	tls *tls.Conn
}

// socket is what crypto/tls reads and writes: writes wait, and so do reads while flags is 0. EAGAIN is a temporary
// net.Error, after which crypto/tls goes on.
type socket struct {
	net.Conn
	fd, flags int
}

func (s *socket) SetWriteDeadline(time.Time) error { return nil }

func (s *socket) Read(buffer []byte) (int, error) {
	for {
		n, err := raw(syscall.SYS_RECVFROM, s.fd, unsafe.Pointer(&buffer[0]), len(buffer), s.flags)
		if err == syscall.EINTR {
			continue
		} else if err != nil {
			return 0, err
		} else if n == 0 {
			return 0, io.EOF
		}
		return n, nil
	}
}

func (s *socket) Write(data []byte) (int, error) {
	for sent := 0; sent < len(data); {
		n, err := raw(syscall.SYS_SENDTO, s.fd, unsafe.Pointer(&data[sent]), len(data)-sent, syscall.MSG_NOSIGNAL)
		if err != nil && err != syscall.EINTR {
			return sent, err
		}
		sent += atLeast0(n)
	}
	return len(data), nil
}

// buffered saves system calls: crypto/tls asks for each record by itself.
type buffered struct {
	*socket
	reader *bufio.Reader
}

func (b buffered) Read(buffer []byte) (int, error) { return b.reader.Read(buffer) }

// startTLS makes a connection's handshake elsewhere; then its events come from the poller, of which EPOLLOUT is the
// first, also where the other side's first bytes are in our buffers already.
func (s *stream) startTLS(side func(net.Conn, *tls.Config) *tls.Conn, config *tls.Config, p *poller, events uint32) {
	check("fcntl", syscall.SetNonblock(s.fd, false))
	under := &socket{fd: s.fd}
	s.tls = side(buffered{under, bufio.NewReaderSize(under, tlsReadBytes)}, config)
	go func() {
		_ = s.tls.Handshake() // each later read and write gives its error
		under.flags = syscall.MSG_DONTWAIT
		p.add(s.fd, events|syscall.EPOLLOUT)
	}()
}

// read gives 0 at the end of the stream, -1 where nothing is there yet. In TLS less than asked for means: no more.
func (s *stream) read(buffer []byte) int {
	if s.tls == nil {
		return read(s.fd, buffer)
	}
	for n := 0; ; {
		more, err := s.tls.Read(buffer[n:])
		n += more
		if n == len(buffer) || n > 0 && err != nil {
			return n
		} else if err == syscall.EAGAIN {
			return -1
		} else if err != nil {
			return 0
		}
	}
}

// discard is a read that does not copy what it reads, where that is possible.
func (s *stream) discard(buffer []byte) int {
	if s.tls == nil {
		return discard(s.fd, buffer)
	}
	return s.read(buffer)
}

// write gives how much was taken.
func (s *stream) write(data []byte) (int, error) {
	if s.tls == nil {
		return write(s.fd, data)
	}
	if len(data) > tlsWriteBytes {
		data = data[:tlsWriteBytes]
	}
	return s.tls.Write(data)
}

// writeAll is for so few bytes that a socket which does not take them at once is a fault.
func (s *stream) writeAll(data []byte) {
	n, err := s.write(data)
	check("send", err)
	if n != len(data) {
		die("a socket took only %d of %d bytes", n, len(data))
	}
}

func (s *stream) close() {
	if s.tls != nil {
		_ = s.tls.CloseWrite()
	}
	_ = syscall.Close(s.fd)
}

// forgetful keeps no session, and is given tickets all the same, as each new client is.
type forgetful struct{}

func (forgetful) Get(string) (*tls.ClientSessionState, bool) { return nil, false }
func (forgetful) Put(string, *tls.ClientSessionState)        {}

func tlsConfig() *tls.Config {
	runtime.GOMAXPROCS(handshakesAtOnce)
	return &tls.Config{
		MinVersion:                  tls.VersionTLS13,
		CurvePreferences:            []tls.CurveID{tls.X25519},
		DynamicRecordSizingDisabled: true,
	}
}

// clientTLS is nil for a load without TLS.
func clientTLS(kind string) *tls.Config {
	if kind == "" {
		return nil
	}
	config := tlsConfig()
	config.ServerName, config.InsecureSkipVerify = "localhost", true
	config.ClientSessionCache = forgetful{}
	if kind == tlsResumed {
		config.ClientSessionCache = tls.NewLRUClientSessionCache(sessionsMax)
	}
	return config
}

// serverTLS is nil for a broker without a certificate.
func serverTLS(certificate, key string) *tls.Config {
	if certificate == "" {
		return nil
	}
	pair, err := tls.LoadX509KeyPair(certificate, key)
	check("certificate", err)
	config := tlsConfig()
	config.Certificates = []tls.Certificate{pair}
	return config
}
