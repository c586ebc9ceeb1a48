package main

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/apache/pulsar-client-go/pulsar"
)

// tally knows which numbered messages came, how often, and whether each was first seen in order in its lane.
type tally struct {
	seen       map[int]bool
	last       map[string]int
	duplicates int
	inOrder    bool
}

func newTally() *tally {
	return &tally{seen: map[int]bool{}, last: map[string]int{}, inOrder: true}
}

func (t *tally) see(number int, lane string) {
	if t.seen[number] {
		t.duplicates++
		return
	}
	t.seen[number] = true
	if last, there := t.last[lane]; there && number <= last {
		t.inOrder = false
	}
	t.last[lane] = number
}

func (t *tally) result(sent int) result {
	return result{
		"sent": sent, "received": len(t.seen), "missing": sent - len(t.seen),
		"duplicates": t.duplicates, "in_order": t.inOrder,
	}
}

// outbox sends asynchronously and counts what failed.
type outbox struct {
	producer pulsar.Producer
	sent     int32
	failures int32
	size     int // with spaces behind it up to so many bytes
}

func (o *outbox) send(key string, number int) {
	atomic.AddInt32(&o.sent, 1)
	message := &pulsar.ProducerMessage{Payload: fmt.Appendf(nil, "%-*d", o.size, number), Key: key}
	o.producer.SendAsync(context.Background(), message,
		func(_ pulsar.MessageID, _ *pulsar.ProducerMessage, err error) {
			if err != nil {
				atomic.AddInt32(&o.failures, 1)
			}
		})
}

func (o *outbox) flush() error {
	if err := o.producer.Flush(); err != nil {
		return err
	}
	if failures := atomic.LoadInt32(&o.failures); failures > 0 {
		return fmt.Errorf("%d sends failed", failures)
	}
	return nil
}

func (r *run) outbox(options pulsar.ProducerOptions) (*outbox, error) {
	if options.Topic == "" {
		options.Topic = r.topic
	}
	options.SendTimeout = -1 // a broker may take as long as it likes to come back
	producer, err := r.client.CreateProducer(options)
	return &outbox{producer: producer}, err
}

func (r *run) consumer(options pulsar.ConsumerOptions) (pulsar.Consumer, error) {
	if options.Topic == "" && options.TopicsPattern == "" {
		options.Topic = r.topic
	}
	options.SubscriptionName = "s"
	return r.client.Subscribe(options)
}

func receive(consumer pulsar.Consumer, limit time.Duration) (pulsar.Message, error) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	return consumer.Receive(ctx)
}

func numberIn(message pulsar.Message) int {
	number, err := strconv.Atoi(strings.TrimRight(string(message.Payload()), " "))
	if err != nil {
		panic(err)
	}
	return number
}

// drain receives and acknowledges until everything is there; a gap of 15 s is the end.
func drain(consumer pulsar.Consumer, t *tally, count int, byTopic bool) error {
	for len(t.seen) < count {
		message, err := receive(consumer, 60*time.Second)
		if err != nil {
			return fmt.Errorf("after %d of %d: %w", len(t.seen), count, err)
		}
		lane := ""
		if byTopic {
			lane = message.Topic()
		}
		t.see(numberIn(message), lane)
		if err := consumer.Ack(message); err != nil {
			return err
		}
	}
	return nil
}
