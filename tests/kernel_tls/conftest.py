"""These tests need a kernel with TLS, and are there only in the guest that tests/e2e/test_kernel_tls.py boots; or where
you say that this machine's kernel has it: `PULSAR_TRIO_PROXY_KERNEL_TLS=1 .venv/bin/pytest tests/kernel_tls`.
"""

import os

from e2e.lab.kernel_tls_guest import IS_INSIDE

from proxy.runtime.network.kernel_tls import use_kernel_tls

collect_ignore_glob = [] if os.environ.get(IS_INSIDE) else ["test_*.py"]

if not collect_ignore_glob:
    use_kernel_tls("required")
