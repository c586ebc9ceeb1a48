// The Go client's program of the end-to-end tests; ../README.md has the contract.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/apache/pulsar-client-go/pulsar"
	plog "github.com/apache/pulsar-client-go/pulsar/log"
	"github.com/sirupsen/logrus"
)

type result map[string]any

// run is one run of one scenario.
type run struct {
	client  pulsar.Client
	options map[string]string
	topic   string
}

func (r *run) number(name string, otherwise int) int {
	if text, there := r.options[name]; there {
		if number, err := strconv.Atoi(text); err == nil {
			return number
		}
	}
	return otherwise
}

var scenarios = map[string]func(*run) (result, error){
	"produce_consume": produceConsume,
	"partitioned":     partitioned,
	"pattern":         pattern,
	"reader":          reader,
	"schema":          schema,
	"key_shared":      keyShared,
	"large":           large,
	"many_topics":     manyTopics,
	"stream":          stream,
	"attempt":         attempt,
}

func connect(options map[string]string) (pulsar.Client, error) {
	logger := logrus.New() // logs to standard error, where the harness counts reconnects
	seconds := 30
	if text, there := options["timeout_s"]; there {
		seconds, _ = strconv.Atoi(text)
	}
	chosen := pulsar.ClientOptions{
		URL:               options["url"],
		OperationTimeout:  time.Duration(seconds) * time.Second,
		ConnectionTimeout: 5 * time.Second,
		Logger:            plog.NewLoggerWithLogrus(logger),
	}
	if token, there := options["token"]; there {
		chosen.Authentication = pulsar.NewAuthenticationToken(token)
	}
	if certificate, there := options["certificate"]; there {
		chosen.Authentication = pulsar.NewAuthenticationTLS(certificate, options["key"])
	}
	if trust, there := options["trust"]; there {
		chosen.TLSTrustCertsFilePath = trust
		chosen.TLSValidateHostname = true
	}
	return pulsar.NewClient(chosen)
}

func errorType(err error) string {
	var known *pulsar.Error
	if errors.As(err, &known) {
		return fmt.Sprintf("pulsar.Result(%d)", known.Result())
	}
	return fmt.Sprintf("%T", err)
}

func execute(options map[string]string) (result, error) {
	client, err := connect(options)
	if err != nil {
		return nil, err
	}
	scenario, there := scenarios[options["scenario"]]
	if !there {
		return nil, fmt.Errorf("no scenario %q", options["scenario"])
	}
	return scenario(&run{client: client, options: options, topic: options["topic"]})
}

func main() {
	options := map[string]string{}
	for _, argument := range os.Args[1:] {
		name, value, _ := strings.Cut(argument, "=")
		options[name] = value
	}
	outcome, err := execute(options)
	if err != nil {
		outcome = result{"ok": false, "error_type": errorType(err), "error": err.Error()}
	} else {
		outcome["ok"] = true
	}
	text, _ := json.Marshal(outcome)
	fmt.Println("RESULT " + string(text))
}
