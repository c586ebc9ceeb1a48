package main

import "encoding/binary"

// The few messages of Pulsar's protocol that are needed, by hand: see proto/pulsar.proto for the numbers.
const (
	typeConnect        = 2
	typeConnected      = 3
	typeSend           = 6
	typePing           = 18
	typePong           = 19
	typeLookup         = 23
	typeLookupResponse = 24
	typeMode           = 100 // not Pulsar's

	protocolVersion = 21
	lookupConnect   = 1
	sizeBytes       = 4
)

func varint(number int, value uint64) []byte {
	return binary.AppendUvarint(binary.AppendUvarint(nil, uint64(number)<<3), value)
}

func bytesField(number int, value []byte) []byte {
	head := binary.AppendUvarint(binary.AppendUvarint(nil, uint64(number)<<3|2), uint64(len(value)))
	return append(head, value...)
}

func message(fields ...[]byte) []byte {
	var all []byte
	for _, field := range fields {
		all = append(all, field...)
	}
	return all
}

// frame wraps a command, whose number among BaseCommand's fields is also its type, in BaseCommand and sizes.
func frame(commandType int, command []byte) []byte {
	base := message(varint(1, uint64(commandType)), bytesField(commandType, command))
	sizes := binary.BigEndian.AppendUint32(nil, uint32(sizeBytes+len(base)))
	sizes = binary.BigEndian.AppendUint32(sizes, uint32(len(base)))
	return append(sizes, base...)
}

// fillerFrame is a frame of so many bytes, sizes included: a SEND as clients write it, with a payload of zeros.
func fillerFrame(size int) []byte {
	head := frame(typeSend, message(varint(1, 0), varint(2, 0)))
	if size < len(head) {
		die("too few bytes for a frame")
	}
	all := make([]byte, size)
	copy(all, head)
	binary.BigEndian.PutUint32(all, uint32(size-sizeBytes))
	return all
}

func modeFrame(mode byte) []byte { return frame(typeMode, []byte{mode}) }

func connectFrame(target, token string) []byte {
	fields := [][]byte{bytesField(1, []byte("bench")), varint(4, protocolVersion)}
	if token != "" {
		fields = append(fields, bytesField(3, []byte(token)), bytesField(5, []byte("token")))
	}
	if target != "" {
		fields = append(fields, bytesField(6, []byte(target)))
	}
	return frame(typeConnect, message(fields...))
}

func connectedFrame() []byte {
	flags := message(varint(1, 1), varint(2, 1), varint(3, 1), varint(5, 1), varint(6, 1))
	return frame(typeConnected, message(
		bytesField(1, []byte("scripted broker")), varint(2, protocolVersion), varint(3, 5<<20), bytesField(4, flags),
	))
}

func pongFrame() []byte { return frame(typePong, nil) }

func lookupFrame(topic []byte, requestID uint64) []byte {
	return frame(typeLookup, message(bytesField(1, topic), varint(2, requestID), varint(3, 0)))
}

func lookupResponseFrame(url string, requestID uint64) []byte {
	return frame(typeLookupResponse, message(
		bytesField(1, []byte(url)), varint(3, lookupConnect), varint(4, requestID), varint(5, 1), varint(8, 1),
	))
}

// nextFrame gives the first whole frame's BaseCommand and what follows the frame; none if it is not whole yet.
func nextFrame(data []byte) (base, rest []byte, whole bool) {
	if len(data) < 2*sizeBytes {
		return nil, data, false
	}
	end := sizeBytes + int(binary.BigEndian.Uint32(data))
	if len(data) < end {
		return nil, data, false
	}
	baseEnd := 2*sizeBytes + int(binary.BigEndian.Uint32(data[sizeBytes:]))
	if baseEnd > end {
		die("a frame's sizes contradict each other")
	}
	return data[2*sizeBytes : baseEnd], data[end:], true
}

// field finds a field of a message: a number in value, bytes in data. The last of its kind wins.
func field(message []byte, number int) (value uint64, data []byte) {
	for len(message) > 0 {
		tag, n := binary.Uvarint(message)
		if n <= 0 {
			die("not a protobuf message")
		}
		message = message[n:]
		v, n := binary.Uvarint(message)
		if n <= 0 || tag&7 != 0 && tag&7 != 2 {
			die("an unexpected protobuf field, tag %d", tag)
		}
		message = message[n:]
		var content []byte
		if tag&7 == 2 {
			content, message = message[:v], message[v:]
		}
		if tag>>3 == uint64(number) {
			value, data = v, content
		}
	}
	return value, data
}
