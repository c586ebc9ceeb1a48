package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"sort"
	"syscall"
	"time"
)

// result is what a window measured. It begins and ends in silence, with nothing under way, so that the CPU time which
// the harness reads before and after it belongs to these operations and no others.
type result struct {
	Operations   int64   `json:"operations"`
	Bytes        int64   `json:"bytes"`
	Retries      int64   `json:"retries"`
	Resumed      int64   `json:"resumed"`
	Cipher       string  `json:"cipher"`
	Seconds      float64 `json:"seconds"`
	LoadCPU      float64 `json:"load_cpu_s"`
	MedianMicros float64 `json:"p50_us"`
	P99Micros    float64 `json:"p99_us"`
	latencies    []int64
}

var commands = bufio.NewReader(os.Stdin)

// await tells the harness where we are and waits for its word, which is a line.
func await(text string) {
	fmt.Println(text)
	if _, err := commands.ReadString('\n'); err != nil {
		os.Exit(0) // the harness has gone
	}
}

// measure runs a load: to warm up, and then once the harness is ready. load ends when nothing is under way any more.
func measure(s settings, load func(deadline int64, r *result)) {
	if s.warmUp > 0 {
		load(monotonic()+int64(s.warmUp), &result{})
	}
	await("ready")
	r := result{latencies: make([]int64, 0, 1<<20)}
	cpu, started := cpuSeconds(), monotonic()
	load(started+int64(s.window), &r)
	r.Seconds = float64(monotonic()-started) / 1e9
	r.Cipher = negotiated
	r.LoadCPU = cpuSeconds() - cpu
	r.MedianMicros, r.P99Micros = quantiles(r.latencies)
	text, err := json.Marshal(r)
	check("json", err)
	await(string(text))
}

func quantiles(latencies []int64) (median, p99 float64) {
	if len(latencies) == 0 {
		return 0, 0
	}
	sort.Slice(latencies, func(i, j int) bool { return latencies[i] < latencies[j] })
	at := func(share float64) float64 { return float64(latencies[int(share*float64(len(latencies)-1))]) / 1e3 }
	return at(0.5), at(0.99)
}

var epoch = time.Now()

// monotonic is in nanoseconds.
func monotonic() int64 { return int64(time.Since(epoch)) }

func cpuSeconds() float64 {
	var usage syscall.Rusage
	check("getrusage", syscall.Getrusage(syscall.RUSAGE_SELF, &usage))
	return float64(usage.Utime.Nano()+usage.Stime.Nano()) / 1e9
}
