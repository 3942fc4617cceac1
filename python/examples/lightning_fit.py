"""Lightning's Trainer. The lines that read with Feedline end with ``# feedline``.

    python lightning_fit.py [CORPUS]

Its checkpoints hold the state of the loader: ``fit(..., ckpt_path=...)`` continues the stream.
"""

import lightning
import torch
from demo_corpus import corpus_prefix, output_folder
from tiny_model import TinyGPT, mean_loss

import feedline.torch  # feedline


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = TinyGPT()

    def training_step(self, batch, index):
        loss = mean_loss(self.network(batch["tokens"]), batch["labels"])
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


samples = feedline.open(corpus_prefix(), sequence_length=64, num_samples=80)  # feedline
loader = feedline.torch.Loader(samples, micro_batch_size=4)  # feedline
trainer = lightning.Trainer(
    accelerator="cpu", max_epochs=1, default_root_dir=output_folder(), logger=False
)
trainer.fit(Model(), loader)
print(f"loss {float(trainer.callback_metrics['loss']):.4f} after {loader.samples_consumed} samples")
