import gc, pytest, ray
from tests.engine.test_cases_faults import *
from tests.engine.conftest import local_cluster, tiny_model

def probe(_):
    import gc, ctypes, sys
    from collections import Counter
    n = gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    import psutil
    c = Counter(type(o).__name__ for o in gc.get_objects())
    return n, psutil.Process().memory_full_info().uss / 2**20, c

def test_diag(local_cluster, tiny_model):
    config, handles = start_with(BrokenWorker, tiny_model, "broken", max_num_seqs=8)
    try:
        with Client(name="broken", namespace=config.namespace, start=False) as client:
            actor = handles.scheduler
            prev = None
            for wave in range(10):
                for handle in client.submit_many([PROMPTS[0][:40]] * 300, PARAMS):
                    with pytest.raises(RequestFailed, match="boom"):
                        handle.result(timeout=DEADLINE_S)
                raw = private_mb(pid_of("haversack-broken-scheduler"))
                n, uss, c = ray.get(actor.__ray_call__.remote(probe))
                print(wave, "raw", round(raw,1), "collected", n, "uss", round(uss,1), "steps", client.stats().scheduler.num_steps,
                      {k: v - prev[k] for k, v in c.most_common(400) if prev and v - prev[k] > 100} if prev else "")
                prev = c
    finally:
        kill_engine(handles)
