#!/bin/sh
# Start SeaweedFS as one process with an S3 gateway, keys of the environment and the bucket `umim`.
set -eu
umask 077
cat >/tmp/s3.json <<KEYS
{"identities": [{"name": "umim", "actions": ["Admin"],
  "credentials": [{"accessKey": "$S3_ACCESS_KEY", "secretKey": "$S3_SECRET_KEY"}]}]}
KEYS
(
    until echo "s3.bucket.create -name umim" | weed shell -master=127.0.0.1:9333; do sleep 2; done
) >/dev/null 2>&1 &
exec weed server -dir=/data -s3 -s3.port=8333 -s3.config=/tmp/s3.json
