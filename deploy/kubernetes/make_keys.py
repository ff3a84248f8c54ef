"""Make the Secret with the cluster's key, unless it exists: `make_keys.py NAME`, as a Job runs it."""

from __future__ import annotations

import base64
import json
import os
import ssl
import subprocess
import sys
import urllib.request
from pathlib import Path
from urllib.error import HTTPError

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_EXISTS = 409


def main(name: str) -> None:
    key = subprocess.run(["moonpool", "certs", "key"], check=True, capture_output=True).stdout.strip()
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "labels": {"app.kubernetes.io/part-of": "moonpool"}},
        "data": {"cluster_key": base64.b64encode(key).decode()},
    }
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    namespace, token = ((ACCOUNT / file).read_text().strip() for file in ("namespace", "token"))
    request = urllib.request.Request(
        f"https://{where}/api/v1/namespaces/{namespace}/secrets",
        json.dumps(secret).encode(),
        {"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
    )
    tls = ssl.create_default_context(cafile=ACCOUNT / "ca.crt")
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=tls)
    )
    try:
        opener.open(request, timeout=30).close()
    except HTTPError as error:
        if error.code != _EXISTS:
            raise SystemExit(f"the Secret {name} cannot be made: {error}: {error.read().decode()}") from error
        print(f"the Secret {name} exists; it stays as it is")
    else:
        print(f"the Secret {name} is made")


if __name__ == "__main__":
    main(sys.argv[1])
