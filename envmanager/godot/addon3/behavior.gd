tool
class_name EnvManagerBehavior, "res://addons/envmanager/icons/behavior.svg"
extends Resource
# How the agents of one behavior learn: their trainer and its options. The field `settings` of an agent refers to it.
#
# A field that is left as it is here leaves the choice to the trainer. A config of the training wins over the scene.

# The algorithm: ppo for any actions, dqn for one discrete action, sac for continuous actions. Empty: ppo.
export(String, "", "ppo", "dqn", "sac") var trainer = ""
# Whether it learns from the beginning. If not, it only acts, until it is unfrozen.
export(bool) var learns = true
# The sizes of the hidden layers, such as [64, 64].
export(PoolIntArray) var hidden = PoolIntArray()
# Divides observations by their spread so far, after subtracting their mean. Pictures stay as they are.
export(bool) var normalize_observations = false
# How far one update goes, such as 0.0003. 0: the trainer's own.
export(float, 0, 1, 0.000001) var learning_rate = 0.0
# What a reward is worth one step later, such as 0.99. 0: the trainer's own.
export(float, 0, 1, 0.0001) var gamma = 0.0
# Divides rewards by the spread of the returns so far.
export(bool) var normalize_rewards = false
# How many numbers a network learns from at once (ppo). 0: the trainer's own.
export(int, 0, 65536) var minibatch = 0
# How many steps a network learns from at once (dqn, sac). 0: the trainer's own.
export(int, 0, 65536) var batch = 0
# How many steps of agents an update learns from. 0: the trainer's own.
export(int, 0, 1048576) var rollout = 0
# How often an update goes through them. 0: the trainer's own.
export(int, 0, 1000) var epochs = 0
# How far rewards to come count when an action is judged, such as 0.95. 0: the trainer's own.
export(float, 0, 1, 0.001) var gae_lambda = 0.0
# How much is given for trying different actions, such as 0.01.
export(float, 0, 1, 0.0001) var entropy_coefficient = 0.0
# Any other options of the trainer, by their names: {"target_every": 500}.
export(Dictionary) var more = {}
