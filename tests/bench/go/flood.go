package main

import (
	"crypto/tls"
	"encoding/json"
	"fmt"
	"net"
	"runtime"
	"runtime/debug"
	"sync/atomic"
	"time"
)

const (
	floodUnderWayMax = 512
	floodPeers       = 100 // the last byte of the first address: loads have the ones below
)

// runFlood makes full handshakes at a rate, whatever becomes of them, until the harness has gone, and resets each
// connection once its handshake is done. What is asked for is reported for the time between two words of the harness.
func runFlood(s settings) {
	runtime.UnlockOSThread()
	config := clientTLS(tlsFull)
	runtime.GOMAXPROCS(1)
	debug.SetGCPercent(100)
	var done, failed, underWay int64
	address := fmt.Sprintf("127.0.0.1:%d", s.port)
	handshake := func(number int64) {
		defer atomic.AddInt64(&underWay, -1)
		source := net.IPv4(127, 0, 0, byte(floodPeers+number%int64(s.addresses)))
		dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: source}, Timeout: dialTimeoutMs * time.Millisecond}
		connection, err := dialer.Dial("tcp4", address)
		if err != nil {
			atomic.AddInt64(&failed, 1)
			return
		}
		defer connection.Close()
		_ = connection.(*net.TCPConn).SetLinger(0)
		_ = connection.SetDeadline(time.Now().Add(dialTimeoutMs * time.Millisecond))
		if tls.Client(connection, config).Handshake() != nil {
			atomic.AddInt64(&failed, 1)
			return
		}
		atomic.AddInt64(&done, 1)
	}
	go func() {
		started := monotonic()
		for number := int64(0); ; time.Sleep(time.Millisecond) {
			for ; number < (monotonic()-started)*int64(s.rate)/1e9; number++ {
				if atomic.LoadInt64(&underWay) >= floodUnderWayMax {
					continue // the proxy is behind: this one is left out
				}
				atomic.AddInt64(&underWay, 1)
				go handshake(number)
			}
		}
	}()
	for text := "ready"; ; {
		await(text)
		started, before, failedBefore := monotonic(), atomic.LoadInt64(&done), atomic.LoadInt64(&failed)
		await("{}")
		seconds := float64(monotonic()-started) / 1e9
		report, err := json.Marshal(map[string]float64{
			"done":   float64(atomic.LoadInt64(&done)-before) / seconds,
			"failed": float64(atomic.LoadInt64(&failed)-failedBefore) / seconds,
		})
		check("json", err)
		text = string(report)
	}
}
