"""An S3 server on loopback, with one bucket."""

from collections.abc import Iterator
from contextlib import contextmanager
from urllib.request import Request, urlopen

import boto3
import pytest
from moto.server import ThreadedMotoServer

BUCKET = "bucket"


@contextmanager
def s3_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """URI of the server's bucket; environment variables of this process point to the server."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    names = {"ACCESS_KEY_ID": "none", "SECRET_ACCESS_KEY": "none", "DEFAULT_REGION": "us-east-1"}
    for name, value in (names | {"ENDPOINT_URL": f"http://{host}:{port}", "EC2_METADATA_DISABLED": "true"}).items():
        monkeypatch.setenv(f"AWS_{name}", value)
    # All servers of a process share one store: it is reset, so that each has a new bucket.
    urlopen(Request(f"http://{host}:{port}/moto-api/reset", method="POST")).close()
    boto3.client("s3").create_bucket(Bucket=BUCKET)
    yield f"s3://{BUCKET}"
    server.stop()
