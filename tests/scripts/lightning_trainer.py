"""Train an autoencoder with lightning.Trainer, with validation and a learning rate schedule."""

import argparse

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class AutoEncoder(lightning.LightningModule):
    def __init__(self, width):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 8))
        self.decoder = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 64))

    def training_step(self, batch, batch_index):
        (images,) = batch
        loss = nn.functional.mse_loss(self.decoder(self.encoder(images)), images)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_index):
        (images,) = batch
        self.log("val_loss", nn.functional.mse_loss(self.decoder(self.encoder(images)), images), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--devices", type=int, default=2)
    arguments = parser.parse_args()
    data = TensorDataset(torch.rand(1024, 64))
    trainer = lightning.Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=arguments.devices,
        strategy="ddp",
        max_epochs=4,
        gradient_clip_val=1.0,
        val_check_interval=20,
        limit_val_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        AutoEncoder(32),
        DataLoader(data, batch_size=arguments.batch_size, shuffle=True),
        DataLoader(data, batch_size=arguments.batch_size),
    )


if __name__ == "__main__":
    main()
