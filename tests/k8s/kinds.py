"""The custom kinds that the manifests use, as their makers publish them: for each, the fields that the
manifests use, and their types.

A field that is not here is an error, so that a new field is looked up first. From the
CustomResourceDefinitions of kueue 0.15 (v1beta2), prometheus-operator 0.80 and cert-manager 1.18.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def text(pattern: str | None = None) -> Schema:
    return {"type": "string"} | ({"pattern": pattern} if pattern else {})


def fields(required: tuple[str, ...] = (), **properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def many(item: Schema, **bounds: int) -> Schema:
    return {"type": "array", "items": item, **bounds}


NAME = text(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$")
STRINGS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
DURATION = text(
    r"^(0|(([0-9]+)y)?(([0-9]+)w)?(([0-9]+)d)?(([0-9]+)h)?(([0-9]+)m)?(([0-9]+)s)?(([0-9]+)ms)?)$"
)
QUANTITY = {"anyOf": [{"type": "integer"}, text(r"^[0-9]+(\.[0-9]+)?([EPTGMk]i?|m)?$")]}
SELECTOR = fields(matchLabels=STRINGS)
KEY_OF_A_SECRET = fields(("key",), name=text(), key=text())
METADATA = fields(("name",), name=NAME, namespace=NAME, labels=STRINGS, annotations=STRINGS)


def kind(spec: Schema | None, *, namespaced: bool) -> Schema:
    properties = {"apiVersion": text(), "kind": text(), "metadata": METADATA}
    if namespaced:
        properties["metadata"] = METADATA | {"required": ["name", "namespace"]}
    if spec is not None:
        properties["spec"] = spec
    return fields(tuple(properties), **properties)


KINDS: dict[tuple[str, str], Schema] = {
    ("kueue.x-k8s.io/v1beta2", "ResourceFlavor"): kind(None, namespaced=False),
    ("kueue.x-k8s.io/v1beta2", "LocalQueue"): kind(
        fields(("clusterQueue",), clusterQueue=NAME), namespaced=True
    ),
    ("kueue.x-k8s.io/v1beta2", "ClusterQueue"): kind(
        fields(
            namespaceSelector=SELECTOR,
            resourceGroups=many(
                fields(
                    ("coveredResources", "flavors"),
                    coveredResources=many(text(), minItems=1, maxItems=64),
                    flavors=many(
                        fields(
                            ("name", "resources"),
                            name=NAME,
                            resources=many(
                                fields(("name", "nominalQuota"), name=text(), nominalQuota=QUANTITY),
                                minItems=1,
                                maxItems=64,
                            ),
                        ),
                        minItems=1,
                        maxItems=64,
                    ),
                ),
                maxItems=16,
            ),
        ),
        namespaced=False,
    ),
    ("cert-manager.io/v1", "Issuer"): kind(
        fields(selfSigned=fields(), ca=fields(("secretName",), secretName=NAME)), namespaced=True
    ),
    ("cert-manager.io/v1", "Certificate"): kind(
        fields(
            ("secretName", "issuerRef"),
            secretName=NAME,
            issuerRef=fields(("name",), name=NAME, kind=text(), group=text()),
            isCA={"type": "boolean"},
            commonName=text(r"^.{1,64}$"),
            dnsNames=many(text()),
            usages=many({"enum": ["digital signature", "server auth", "client auth"]}),
            duration=text(r"^([0-9]+(h|m|s))+$"),
            renewBefore=text(r"^([0-9]+(h|m|s))+$"),
            privateKey=fields(
                algorithm={"enum": ["RSA", "ECDSA", "Ed25519"]},
                size={"type": "integer"},
                rotationPolicy={"enum": ["Never", "Always"]},
            ),
        ),
        namespaced=True,
    ),
    ("monitoring.coreos.com/v1", "PodMonitor"): kind(
        fields(
            ("selector",),
            selector=SELECTOR,
            jobLabel=text(),
            podTargetLabels=many(text()),
            podMetricsEndpoints=many(
                fields(
                    port=text(),
                    path=text(),
                    interval=DURATION,
                    scrapeTimeout=DURATION,
                    honorLabels={"type": "boolean"},
                    scheme={"enum": ["http", "https"]},
                    tlsConfig=fields(
                        ca=fields(secret=KEY_OF_A_SECRET),
                        serverName=text(),
                        insecureSkipVerify={"type": "boolean"},
                    ),
                    authorization=fields(type=text(), credentials=KEY_OF_A_SECRET),
                    relabelings=many(
                        fields(
                            sourceLabels=many(text(r"^[a-zA-Z_][a-zA-Z0-9_]*$")),
                            targetLabel=text(),
                            regex=text(),
                            replacement=text(),
                            action=text(),
                        )
                    ),
                )
            ),
        ),
        namespaced=True,
    ),
    ("monitoring.coreos.com/v1", "PrometheusRule"): kind(
        fields(
            groups=many(
                fields(
                    ("name",),
                    name=text(r".+"),
                    interval=DURATION,
                    rules=many(
                        fields(
                            ("expr",),
                            alert=text(),
                            record=text(),
                            expr={"type": ["string", "integer"]},
                            labels=STRINGS,
                            annotations=STRINGS,
                            keep_firing_for=DURATION,
                            **{"for": DURATION},
                        )
                    ),
                )
            )
        ),
        namespaced=True,
    ),
}
