package main

import (
	"bytes"
	"context"
	"fmt"
	"math/rand"
	"strconv"
	"time"

	"github.com/apache/pulsar-client-go/pulsar"
)

// transfer sends count messages and drains the consumer.
func transfer(o *outbox, consumer pulsar.Consumer, count int, byTopic bool) (result, *tally, error) {
	t := newTally()
	for i := 0; i < count; i++ {
		o.send("", i)
	}
	if err := drain(consumer, t, count, byTopic); err != nil {
		return nil, nil, err
	}
	return t.result(count), t, o.flush()
}

func produceConsume(r *run) (result, error) {
	consumer, err := r.consumer(pulsar.ConsumerOptions{})
	if err != nil {
		return nil, err
	}
	o, err := r.outbox(pulsar.ProducerOptions{})
	if err != nil {
		return nil, err
	}
	o.size = r.number("size", 0)
	outcome, _, err := transfer(o, consumer, r.number("count", 10000), false)
	return outcome, err
}

func partitioned(r *run) (result, error) {
	consumer, err := r.consumer(pulsar.ConsumerOptions{})
	if err != nil {
		return nil, err
	}
	o, err := r.outbox(pulsar.ProducerOptions{DisableBatching: true})
	if err != nil {
		return nil, err
	}
	outcome, t, err := transfer(o, consumer, r.number("count", 2000), true)
	if err != nil {
		return nil, err
	}
	outcome["partitions"] = len(t.last)
	return outcome, nil
}

func pattern(r *run) (result, error) {
	topics := r.number("topics", 5)
	count := topics * r.number("count", 100)
	boxes := []*outbox{}
	for i := 0; i < topics; i++ {
		o, err := r.outbox(pulsar.ProducerOptions{Topic: fmt.Sprintf("%s-%d", r.topic, i)})
		if err != nil {
			return nil, err
		}
		boxes = append(boxes, o)
	}
	consumer, err := r.consumer(pulsar.ConsumerOptions{TopicsPattern: r.topic + "-.*"})
	if err != nil {
		return nil, err
	}
	t := newTally()
	for i := 0; i < count; i++ {
		boxes[i%topics].send("", i)
	}
	if err := drain(consumer, t, count, true); err != nil {
		return nil, err
	}
	outcome := t.result(count)
	outcome["topics"] = len(t.last)
	return outcome, nil
}

func reader(r *run) (result, error) {
	count := r.number("count", 1000)
	o, err := r.outbox(pulsar.ProducerOptions{})
	if err != nil {
		return nil, err
	}
	for i := 0; i < count; i++ {
		o.send("", i)
	}
	if err := o.flush(); err != nil {
		return nil, err
	}
	opened, err := r.client.CreateReader(pulsar.ReaderOptions{Topic: r.topic, StartMessageID: pulsar.EarliestMessageID()})
	if err != nil {
		return nil, err
	}
	t := newTally()
	for opened.HasNext() {
		ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
		message, err := opened.Next(ctx)
		cancel()
		if err != nil {
			return nil, err
		}
		t.see(numberIn(message), "")
	}
	outcome := t.result(count)
	outcome["more_left"] = opened.HasNext()
	return outcome, nil
}

// reading is the record that the schema scenario sends.
type reading struct {
	Number int    `json:"number" avro:"number"`
	Name   string `json:"name" avro:"name"`
}

const readingDefinition = `{"type":"record","name":"Reading","namespace":"e2e","fields":[` +
	`{"name":"number","type":"int"},{"name":"name","type":"string"}]}`

func schema(r *run) (result, error) {
	var chosen pulsar.Schema = pulsar.NewJSONSchema(readingDefinition, nil)
	switch r.options["kind"] {
	case "avro":
		chosen = pulsar.NewAvroSchema(readingDefinition, nil)
	case "string":
		chosen = pulsar.NewStringSchema(nil)
	}
	consumer, err := r.consumer(pulsar.ConsumerOptions{Schema: chosen})
	if err != nil {
		return nil, err
	}
	o, err := r.outbox(pulsar.ProducerOptions{Schema: chosen})
	if err != nil {
		return nil, err
	}
	return typed(r, o, consumer)
}

func typed(r *run, o *outbox, consumer pulsar.Consumer) (result, error) {
	count, equal, text := r.number("count", 200), true, r.options["kind"] == "string"
	for i := 0; i < count; i++ {
		var value any = &reading{Number: i, Name: fmt.Sprintf("reading %d", i)}
		if text {
			value = fmt.Sprintf("reading %d", i)
		}
		if _, err := o.producer.Send(context.Background(), &pulsar.ProducerMessage{Value: value}); err != nil {
			return nil, err
		}
	}
	for i := 0; i < count; i++ {
		message, err := receive(consumer, 60*time.Second)
		if err != nil {
			return nil, err
		}
		want := fmt.Sprintf("reading %d", i)
		if text {
			var got *string
			err = message.GetSchemaValue(&got)
			equal = equal && err == nil && *got == want
		} else {
			var got reading
			err = message.GetSchemaValue(&got)
			equal = equal && err == nil && got == reading{i, want}
		}
		consumer.Ack(message)
	}
	return result{"sent": count, "received": count, "values_equal": equal}, nil
}

func keyShared(r *run) (result, error) {
	count, keys := r.number("count", 2000), r.number("keys", 50)
	consumers := []pulsar.Consumer{}
	for i := 0; i < r.number("consumers", 2); i++ {
		consumer, err := r.consumer(pulsar.ConsumerOptions{Type: pulsar.KeyShared})
		if err != nil {
			return nil, err
		}
		consumers = append(consumers, consumer)
	}
	o, err := r.outbox(pulsar.ProducerOptions{BatcherBuilderType: pulsar.KeyBasedBatchBuilder})
	if err != nil {
		return nil, err
	}
	for i := 0; i < count; i++ {
		o.send(strconv.Itoa(i%keys), i)
	}
	if err := o.flush(); err != nil {
		return nil, err
	}
	return shared(consumers, count), nil
}

func shared(consumers []pulsar.Consumer, count int) result {
	t, homes, per := newTally(), map[string]int{}, make([]int, len(consumers))
	single := true
	end := time.Now().Add(60 * time.Second)
	for len(t.seen) < count && time.Now().Before(end) {
		for i, consumer := range consumers {
			for {
				message, err := receive(consumer, 100*time.Millisecond)
				if err != nil {
					break
				}
				t.see(numberIn(message), message.Key())
				if home, there := homes[message.Key()]; there && home != i {
					single = false
				}
				homes[message.Key()] = i
				per[i]++
				consumer.Ack(message)
			}
		}
	}
	outcome := t.result(count)
	outcome["per_consumer"], outcome["keys_on_one_consumer"] = per, single
	return outcome
}

const mib5 = 5 * 1024 * 1024

// large sends the largest message this client accepts: its metadata counts, so it steps down from 5 MiB.
func large(r *run) (result, error) {
	consumer, err := r.consumer(pulsar.ConsumerOptions{})
	if err != nil {
		return nil, err
	}
	o, err := r.outbox(pulsar.ProducerOptions{DisableBatching: true})
	if err != nil {
		return nil, err
	}
	for size := mib5; size > mib5-1024; size -= 16 {
		payload := make([]byte, size)
		rand.New(rand.NewSource(int64(size))).Read(payload)
		if _, err = o.producer.Send(context.Background(), &pulsar.ProducerMessage{Payload: payload}); err != nil {
			continue
		}
		message, err := receive(consumer, 60*time.Second)
		if err != nil {
			return nil, err
		}
		return result{"size": size, "payload_equal": bytes.Equal(payload, message.Payload())}, nil
	}
	return nil, fmt.Errorf("no size near 5 MiB was accepted: %w", err)
}

func attempt(r *run) (result, error) {
	o, err := r.outbox(pulsar.ProducerOptions{})
	if err != nil {
		return nil, err
	}
	o.producer.Close()
	return result{}, nil
}
