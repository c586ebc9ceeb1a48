package main

import (
	"syscall"
	"unsafe"
)

const (
	msgTrunc            = 0x20 // recv(2): of TCP, throw the bytes away instead of copying them
	tcpUserTimeout      = 18   // tcp(7): also how long connect(2) may take
	ipBindAddressNoPort = 24   // ip(7): the port is chosen at connect(2), where the whole tuple counts
	edgeTriggeredBoth   = syscall.EPOLLIN | syscall.EPOLLOUT | 1<<31
	nonBlocking         = syscall.SOCK_NONBLOCK | syscall.SOCK_CLOEXEC

	eventsPerWait   = 512
	listenBacklog   = 4096
	sourceAddresses = 16
	waitForeverMs   = -1
	stalledMs       = 20_000
	dialTimeoutMs   = 10_000 // connectionTimeout of Pulsar's clients
)

// poller is an epoll.
type poller struct {
	fd     int
	events [eventsPerWait]syscall.EpollEvent
}

func newPoller() *poller {
	fd, err := syscall.EpollCreate1(syscall.EPOLL_CLOEXEC)
	check("epoll_create1", err)
	return &poller{fd: fd}
}

func (p *poller) control(operation, fd int, events uint32) {
	event := syscall.EpollEvent{Events: events, Fd: int32(fd)}
	check("epoll_ctl", syscall.EpollCtl(p.fd, operation, fd, &event))
}

func (p *poller) add(fd int, events uint32)    { p.control(syscall.EPOLL_CTL_ADD, fd, events) }
func (p *poller) change(fd int, events uint32) { p.control(syscall.EPOLL_CTL_MOD, fd, events) }

// wait gives the next events; none only where the time is over.
func (p *poller) wait(timeoutMs int) []syscall.EpollEvent {
	for {
		n, err := raw(syscall.SYS_EPOLL_PWAIT, p.fd, unsafe.Pointer(&p.events[0]), eventsPerWait, timeoutMs)
		if err == syscall.EINTR {
			continue
		}
		check("epoll_pwait", err)
		return p.events[:n]
	}
}

// waitOrDie is for loads: a proxy that lets everything wait for so long has lost something.
func (p *poller) waitOrDie() []syscall.EpollEvent {
	events := p.wait(stalledMs)
	if len(events) == 0 {
		die("nothing has moved for %d s", stalledMs/1000)
	}
	return events
}

func loopback(port int) *syscall.SockaddrInet4 {
	return &syscall.SockaddrInet4{Port: port, Addr: [4]byte{127, 0, 0, 1}}
}

func listen(port int) int {
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|nonBlocking, 0)
	check("socket", err)
	check("SO_REUSEADDR", syscall.SetsockoptInt(fd, syscall.SOL_SOCKET, syscall.SO_REUSEADDR, 1))
	check("bind", syscall.Bind(fd, loopback(port)))
	check("listen", syscall.Listen(fd, listenBacklog))
	return fd
}

// dial begins a connection. Source addresses take turns, since one has ports for 28,000 connections a minute only.
func dial(port, number int) int {
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|nonBlocking, 0)
	check("socket", err)
	noDelay(fd)
	userTimeout(fd, dialTimeoutMs)
	source := loopback(0)
	source.Addr[3] += byte(number % sourceAddresses)
	check("IP_BIND_ADDRESS_NO_PORT", syscall.SetsockoptInt(fd, syscall.IPPROTO_IP, ipBindAddressNoPort, 1))
	check("bind", syscall.Bind(fd, source))
	if err := syscall.Connect(fd, loopback(port)); err != syscall.EINPROGRESS {
		check("connect", err)
	}
	return fd
}

// resetAtClose makes close(2) send RST, which leaves no TIME_WAIT.
func resetAtClose(fd int) {
	check("SO_LINGER", syscall.SetsockoptLinger(fd, syscall.SOL_SOCKET, syscall.SO_LINGER, &syscall.Linger{Onoff: 1}))
}

// userTimeout is how long the other side may acknowledge nothing; 0: as long as the kernel's default.
func userTimeout(fd, ms int) {
	check("TCP_USER_TIMEOUT", syscall.SetsockoptInt(fd, syscall.IPPROTO_TCP, tcpUserTimeout, ms))
}

func noDelay(fd int) {
	check("TCP_NODELAY", syscall.SetsockoptInt(fd, syscall.IPPROTO_TCP, syscall.TCP_NODELAY, 1))
}

// raw is a system call behind the back of Go's scheduler, which would otherwise spend as much time on watching a thread
// that blocks for some microseconds, again and again, as the thread itself needs.
func raw(number uintptr, fd int, buffer unsafe.Pointer, size, last int) (int, error) {
	n, _, errno := syscall.RawSyscall6(number, uintptr(fd), uintptr(buffer), uintptr(size), uintptr(last), 0, 0)
	if errno != 0 {
		return -1, errno
	}
	return int(n), nil
}

// read gives 0 at the end of the stream, -1 where nothing is there yet.
func read(fd int, buffer []byte) int {
	return receive(fd, buffer, 0)
}

// discard is a read that does not copy what it reads.
func discard(fd int, buffer []byte) int {
	return receive(fd, buffer, msgTrunc)
}

func receive(fd int, buffer []byte, flags int) int {
	n, err := raw(syscall.SYS_RECVFROM, fd, unsafe.Pointer(&buffer[0]), len(buffer), flags)
	switch err {
	case nil:
		return n
	case syscall.EAGAIN:
		return -1
	case syscall.ECONNRESET, syscall.EPIPE:
		return 0
	}
	check("recv", err)
	return 0
}

// atLeast0 is what a read got, if anything: max came with Go 1.21, and Debian 12 has 1.19.
func atLeast0(n int) int {
	if n < 0 {
		return 0
	}
	return n
}

// write gives how much the kernel took.
func write(fd int, data []byte) (int, error) {
	n, err := raw(syscall.SYS_SENDTO, fd, unsafe.Pointer(&data[0]), len(data), syscall.MSG_NOSIGNAL)
	if err == syscall.EAGAIN {
		return 0, nil
	}
	return n, err
}

func check(what string, err error) {
	if err != nil {
		die("%s: %v", what, err)
	}
}
