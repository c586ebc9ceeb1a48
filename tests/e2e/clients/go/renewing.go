package main

import (
	"bufio"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"hash/crc32"
	"math/rand"
	"os"
	"sync/atomic"
	"time"

	"github.com/apache/pulsar-client-go/pulsar"
	plog "github.com/apache/pulsar-client-go/pulsar/log"
	"github.com/sirupsen/logrus"
)

const numberAndSum = 12

func init() {
	scenarios["renewing"] = renewing
}

// mint counts the tokens that it makes; each ends soon.
type mint struct {
	key       []byte
	lifetimeS int
	minted    atomic.Int32
}

func (m *mint) token() (string, error) {
	m.minted.Add(1)
	encode := base64.RawURLEncoding.EncodeToString
	end := time.Now().Unix() + int64(m.lifetimeS)
	signed := encode([]byte(`{"alg":"HS256"}`)) + "." + encode(fmt.Appendf(nil, `{"sub":"alice","exp":%d}`, end))
	sum := hmac.New(sha256.New, m.key)
	sum.Write([]byte(signed))
	return signed + "." + encode(sum.Sum(nil)), nil
}

func sumOf(message []byte) uint32 {
	return crc32.Update(crc32.ChecksumIEEE(message[:8]), crc32.IEEETable, message[numberAndSum:])
}

// produceUntilStopped sends messages with a number and a sum until a line comes on standard input.
func produceUntilStopped(o *outbox, size, rate int, total *atomic.Int32) {
	var stop atomic.Bool
	go func() {
		bufio.NewReader(os.Stdin).ReadString('\n')
		stop.Store(true)
	}()
	block := make([]byte, max(size, numberAndSum))
	rand.New(rand.NewSource(1)).Read(block)
	next := time.Now()
	for !stop.Load() {
		message := append([]byte(nil), block...)
		binary.BigEndian.PutUint64(message, uint64(o.sent))
		binary.BigEndian.PutUint32(message[8:], sumOf(message))
		o.sendBytes(message)
		next = next.Add(time.Second / time.Duration(rate))
		time.Sleep(time.Until(next))
	}
	if err := o.producer.Flush(); err != nil {
		fmt.Fprintln(os.Stderr, "flush:", err)
		atomic.AddInt32(&o.failures, 1)
	}
	total.Store(o.sent)
}

func (o *outbox) sendBytes(data []byte) {
	o.sent++
	o.producer.SendAsync(context.Background(), &pulsar.ProducerMessage{Payload: data},
		func(_ pulsar.MessageID, _ *pulsar.ProducerMessage, err error) {
			if err != nil {
				fmt.Fprintln(os.Stderr, "send:", err)
				atomic.AddInt32(&o.failures, 1)
			}
		})
}

// renewing is the client with tokens that it mints itself and that end soon; ../RENEWING.md has the contract.
func renewing(r *run) (result, error) {
	key, err := os.ReadFile(r.options["key"])
	if err != nil {
		return nil, err
	}
	m := &mint{key: key, lifetimeS: r.number("lifetime_s", 5)}
	r.client, err = pulsar.NewClient(pulsar.ClientOptions{
		URL:            r.options["url"],
		Authentication: pulsar.NewAuthenticationTokenFromSupplier(m.token),
		Logger:         plog.NewLoggerWithLogrus(logrus.New()),
	})
	if err != nil {
		return nil, err
	}
	consumer, err := r.consumer(pulsar.ConsumerOptions{})
	if err != nil {
		return nil, err
	}
	o, err := r.outbox(pulsar.ProducerOptions{MaxPendingMessages: 500})
	if err != nil {
		return nil, err
	}
	var total atomic.Int32
	total.Store(-1)
	t := newTally()
	report(t, m)
	go produceUntilStopped(o, r.number("size", 100), r.number("rate", 100), &total)
	corrupt := consumeAll(consumer, t, m, &total)
	outcome := t.result(int(total.Load()))
	outcome["corrupt"], outcome["minted"] = corrupt, m.minted.Load()
	outcome["send_failures"] = atomic.LoadInt32(&o.failures)
	return outcome, nil
}

// consumeAll receives until all are there, or nothing has come for 20 s; how many had a wrong sum.
func consumeAll(consumer pulsar.Consumer, t *tally, m *mint, total *atomic.Int32) int {
	corrupt, last := 0, time.Now()
	for total.Load() < 0 || len(t.seen) < int(total.Load()) {
		message, err := receive(consumer, 500*time.Millisecond)
		if err != nil {
			if total.Load() >= 0 && time.Since(last) > 60*time.Second {
				break
			}
			continue
		}
		last = time.Now()
		data := message.Payload()
		if binary.BigEndian.Uint32(data[8:]) != sumOf(data) {
			corrupt++
		}
		t.see(int(binary.BigEndian.Uint64(data)), "")
		consumer.Ack(message)
		report(t, m)
	}
	return corrupt
}

func report(t *tally, m *mint) {
	text, _ := json.Marshal(result{"received": len(t.seen), "minted": m.minted.Load()})
	fmt.Println("PROGRESS " + string(text))
}
