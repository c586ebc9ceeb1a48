// Command generator is both ends of the benchmark: the load, and a scripted broker behind the proxies.
//
// Each is one thread around one epoll, so that what is measured is the proxy between them. Nothing but the standard
// library is used, so that building it fetches nothing.
package main

import (
	"flag"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"time"
)

// settings are what the command line says; a program reads only those it needs.
type settings struct {
	port        int
	target      string
	connections int
	underWay    int
	frame       int
	token       string
	tls         string
	certificate string
	key         string
	addresses   int
	rate        int
	interval    time.Duration
	warmUp      time.Duration
	window      time.Duration
}

var programs = map[string]func(settings){
	"broker":    runBroker,
	"echo":      runEcho,
	"bulk":      runBulk,
	"bulk-down": runBulkDown,
	"connect":   runConnects,
	"reconnect": runReconnects,
	"lookup":    runLookups,
	"fresh":     runFresh,
	"idle":      runIdle,
	"flood":     runFlood,

	"http-server": runHTTPServer,
	"http-get":    runHTTPGet,
	"http-down":   runHTTPGet,
	"http-up":     runHTTPPut,
}

func main() {
	if len(os.Args) < 2 || programs[os.Args[1]] == nil {
		die("usage: generator broker|echo|bulk|bulk-down|connect|reconnect|lookup|fresh|idle|flood|http-server|http-get|http-down|http-up [options]")
	}
	var s settings
	flags := flag.NewFlagSet(os.Args[1], flag.ExitOnError)
	flags.IntVar(&s.port, "port", 0, "TCP port on 127.0.0.1: the broker's own, or where the load connects")
	flags.StringVar(&s.target, "target", "", "host:port of the broker behind the proxy; empty: lookup mode")
	flags.IntVar(&s.connections, "connections", 1, "connections at a time")
	flags.IntVar(&s.underWay, "under-way", 1, "requests under way on each connection for lookups")
	flags.IntVar(&s.frame, "frame", chunkBytes, "bytes of a frame of a bulk transfer; of a body of HTTP")
	flags.StringVar(&s.token, "token", "", "what the load authenticates itself with")
	flags.StringVar(&s.tls, "tls", "", "full|resumed: which handshake of TLS 1.3 the load makes; empty: no TLS")
	flags.StringVar(&s.certificate, "certificate", "", "PEM file of a broker with TLS")
	flags.StringVar(&s.key, "key", "", "PEM file of its private key")
	flags.IntVar(&s.addresses, "addresses", sourceAddresses, "of a flood: so many that it comes from")
	flags.IntVar(&s.rate, "rate", 1000, "of a flood: handshakes a second")
	flags.DurationVar(&s.interval, "interval", 0, "of an echo: between two messages of a connection")
	flags.DurationVar(&s.warmUp, "warm-up", 200*time.Millisecond, "the same load before the window")
	flags.DurationVar(&s.window, "window", 1500*time.Millisecond, "how long to measure")
	_ = flags.Parse(os.Args[2:])
	runtime.GOMAXPROCS(1)
	runtime.LockOSThread()
	debug.SetGCPercent(-1) // nothing here makes garbage in an amount that matters
	programs[os.Args[1]](s)
}

func die(format string, arguments ...any) {
	fmt.Fprintf(os.Stderr, format+"\n", arguments...)
	os.Exit(1)
}
