package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/apache/pulsar-client-go/pulsar"
)

// manyTopics uses many topics at the same time, each with a producer and a consumer of its own.
func manyTopics(r *run) (result, error) {
	topics, each := r.number("count", 50), 20
	outcomes, failures := make([]result, topics), make([]error, topics)
	var all sync.WaitGroup
	for i := 0; i < topics; i++ {
		all.Add(1)
		go func() {
			defer all.Done()
			one := &run{client: r.client, topic: fmt.Sprintf("%s-%d", r.topic, i),
				options: map[string]string{"count": fmt.Sprint(each)}}
			outcomes[i], failures[i] = produceConsume(one)
		}()
	}
	all.Wait()
	received, inOrder := 0, true
	for i, outcome := range outcomes {
		if failures[i] != nil {
			return nil, failures[i]
		}
		received += outcome["received"].(int)
		inOrder = inOrder && outcome["in_order"].(bool)
	}
	return result{"topics": topics, "received": received, "in_order": inOrder}, nil
}

// sendUntilStopped sends about rate messages a second until a line comes on standard input.
func sendUntilStopped(o *outbox, produced *atomic.Bool, rate int) {
	var stop atomic.Bool
	go func() {
		bufio.NewReader(os.Stdin).ReadString('\n')
		stop.Store(true)
	}()
	for !stop.Load() {
		for i := 0; i < rate/100; i++ {
			o.send("", int(atomic.LoadInt32(&o.sent)))
		}
		time.Sleep(10 * time.Millisecond)
	}
	if err := o.producer.Flush(); err != nil {
		fmt.Fprintln(os.Stderr, "flush:", err)
		atomic.AddInt32(&o.failures, 1)
	}
	produced.Store(true)
}

// stream produces and consumes until told to stop, then drains; nothing may be missing.
func stream(r *run) (result, error) {
	consumer, err := r.consumer(pulsar.ConsumerOptions{})
	if err != nil {
		return nil, err
	}
	o, err := r.outbox(pulsar.ProducerOptions{})
	if err != nil {
		return nil, err
	}
	var produced atomic.Bool
	go sendUntilStopped(o, &produced, r.number("rate", 1000))
	t, reported, last := newTally(), 0, time.Now()
	for !(produced.Load() && len(t.seen) == int(atomic.LoadInt32(&o.sent))) {
		message, err := receive(consumer, 500*time.Millisecond)
		if err != nil {
			if produced.Load() && time.Since(last) > 60*time.Second {
				break
			}
			continue
		}
		last = time.Now()
		t.see(numberIn(message), "")
		consumer.Ack(message)
		if len(t.seen)-reported >= 100 {
			reported = len(t.seen)
			text, _ := json.Marshal(result{"received": reported})
			fmt.Println("PROGRESS " + string(text))
		}
	}
	outcome := t.result(int(atomic.LoadInt32(&o.sent)))
	outcome["send_failures"] = atomic.LoadInt32(&o.failures)
	return outcome, nil
}
