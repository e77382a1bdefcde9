import os
import time

from tqdm import tqdm, trange

for _ in (bar := trange(40, desc="epoch 1", disable=int(os.environ["LOCAL_RANK"]) != 0, mininterval=0)):
    bar.set_postfix(loss=f"{1 / (_ + 1):.3f}")
    time.sleep(0.001)
if os.environ["RANK"] == "0":
    tqdm.write("Training finished")
