"""rl4co: the attention model trained by REINFORCE on the travelling salesman's problem."""

from tests.published.package import Package


def build():
    from rl4co.envs import TSPEnv
    from rl4co.models import AttentionModel, AttentionModelPolicy

    env = TSPEnv(generator_params={"num_loc": 6})
    policy = AttentionModelPolicy(
        env_name="tsp", embed_dim=16, num_encoder_layers=3, num_heads=2, feedforward_hidden=16
    )
    module = AttentionModel(env, policy=policy, baseline="mean", batch_size=4, train_data_size=24, val_data_size=4)
    module.setup()
    return module, module.train_dataloader()


PACKAGE = Package("rl4co", "AttentionModel by REINFORCE on TSP", build, trusted=True)
