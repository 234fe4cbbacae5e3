"""What ray_jobs asks of Ray, worked off at once in this process: values through pickle, groups in an odd order."""

import pickle
import sys
import types

import numpy as np
import pyarrow as pa


class Ref:
    def __init__(self, value):
        self.value = value if isinstance(value, pa.Table) else pickle.dumps(value)


def get(ref):
    return ref.value if isinstance(ref.value, pa.Table) else pickle.loads(ref.value)


def remote(**options):
    def wrap(function):
        return types.SimpleNamespace(
            remote=lambda *args: Ref(function(*(get(a) if isinstance(a, Ref) else a for a in args)))
        )

    return wrap


class Dataset:
    """Blocks of rows."""

    def __init__(self, blocks):
        self.blocks = blocks

    def _each(self, function):
        return Dataset([function(block) for block in self.blocks])

    def map(self, function):
        return self._each(lambda block: [function(dict(row)) for row in block])

    def flat_map(self, function):
        return self._each(lambda block: [out for row in block for out in function(dict(row))])

    def map_batches(self, function, batch_size, batch_format="default"):
        def work(block):
            out = []
            for i in range(0, len(block), batch_size):
                rows = block[i : i + batch_size]
                if batch_format == "pyarrow":
                    out += function(pa.Table.from_pylist(rows)).to_pylist()
                else:
                    columns = {name: np.array([r[name] for r in rows]) for name in rows[0]}
                    for batch in function(columns):
                        out += [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
            return out

        return self._each(work)

    def select_columns(self, names):
        return self._each(lambda block: [{n: row[n] for n in names} for row in block])

    def materialize(self):
        return self

    def iter_rows(self):
        return (dict(row) for block in self.blocks for row in block)

    def groupby(self, key, num_partitions):
        groups = {}
        for row in self.iter_rows():
            groups.setdefault(row[key], []).append(row)
        assert num_partitions > 0 and groups
        # Rows of a group come in any order from a shuffle, and so do the groups.
        parts = [[groups[k][::-1]] for k in sorted(groups, reverse=True)]

        def map_groups(function, batch_format):
            return Dataset([function(pa.Table.from_pylist(rows)).to_pylist() for (rows,) in parts])

        return types.SimpleNamespace(map_groups=map_groups)

    def to_arrow_refs(self):
        return [Ref(pa.Table.from_pylist(block)) for block in self.blocks if block]


class RayError(Exception):
    pass


def install(monkeypatch):
    data = types.ModuleType("ray.data")
    data.from_items = lambda items, override_num_blocks: Dataset([[item] for item in items])
    data.from_arrow_refs = lambda refs: Dataset([get(ref).to_pylist() for ref in refs])
    context = types.SimpleNamespace(
        execution_options=types.SimpleNamespace(preserve_order=False), enable_progress_bars=True
    )
    data.DataContext = types.SimpleNamespace(get_current=lambda: context)
    ray = types.ModuleType("ray")
    ray.data, ray.put, ray.get, ray.remote = data, Ref, get, remote
    ray.is_initialized, ray.cluster_resources = (lambda: True), (lambda: {"CPU": 2.0})
    ray.exceptions = types.SimpleNamespace(RayError=RayError)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.data", data)
