package main

import (
	"bufio"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"
)

// serve executes the command line, which is one of `helm template`, and renders again for each line of standard input:
// a release's name and a version of Kubernetes. What is rendered goes to standard output, followed by a NUL and a line.
func serve(root *cobra.Command) error {
	err := root.Execute()
	template, _, _ := root.Find([]string{"template"})
	for lines := bufio.NewScanner(os.Stdin); ; {
		fmt.Printf("\x00%t\n", err == nil)
		if !lines.Scan() {
			return nil
		}
		release, kubernetes, _ := strings.Cut(lines.Text(), " ")
		if err = template.Flags().Set("kube-version", kubernetes); err == nil {
			err = template.RunE(template, []string{release, template.Flags().Arg(1)})
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, "Error:", err)
		}
	}
}
