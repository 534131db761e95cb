from configs import lra_image


def get_config():
  config = lra_image.get_config()

  config.data.name = "listops"
  config.data.length = 2000
  config.data.columns = 50

  config.model.num_layers = 4
  config.model.width = 512

  config.attention.stride = 50
  config.attention.window = 50
  config.attention.width = 10

  config.train.steps = 5000
  config.train.batch_size = 32
  config.eval.every = 500
  config.eval.batch_size = 32
  config.eval.sequences = 0
  config.checkpoint.every = 500
  return config
