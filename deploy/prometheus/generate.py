"""Write prometheus-rule.yaml, rules.yml as an object for the Prometheus operator (kustomize can put a file
into a ConfigMap, but not into another kind of object): python deploy/prometheus/generate.py."""

from pathlib import Path

HERE = Path(__file__).parent
HEAD = """\
# Generated from rules.yml: change rules.yml, and run generate.py.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: elasticd
  labels:
    app.kubernetes.io/part-of: elasticd
spec:
"""


def text_of(rules: str) -> str:
    """Return the object with these rules, including their comments."""
    return HEAD + "".join(f"  {line}" if line.strip() else line for line in rules.splitlines(keepends=True))


if __name__ == "__main__":
    (HERE / "prometheus-rule.yaml").write_text(text_of((HERE / "rules.yml").read_text()))
