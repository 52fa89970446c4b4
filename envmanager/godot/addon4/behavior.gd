@tool
@icon("res://addons/envmanager/icons/behavior.svg")
class_name EnvManagerBehavior
extends Resource
## How the agents of one behavior learn: their trainer and its options. The field `settings` of an agent refers to it.
##
## A field that is left as it is here leaves the choice to the trainer. A config of the training wins over the scene.

## The algorithm: ppo for any actions, dqn for one discrete action, sac for continuous actions. Empty: ppo.
@export_enum("ppo", "dqn", "sac") var trainer := ""
## Whether it learns from the beginning. If not, it only acts, until it is unfrozen.
@export var learns := true
@export_group("Network")
## The sizes of the hidden layers, such as [64, 64].
@export var hidden := PackedInt32Array()
## Divides observations by their spread so far, after subtracting their mean. Pictures stay as they are.
@export var normalize_observations := false
@export_group("Learning")
## How far one update goes, such as 0.0003. 0: the trainer's own.
@export_range(0, 0.1, 0.000001, "or_greater") var learning_rate := 0.0
## What a reward is worth one step later, such as 0.99. 0: the trainer's own.
@export_range(0, 1, 0.0001) var gamma := 0.0
## Divides rewards by the spread of the returns so far.
@export var normalize_rewards := false
## How many numbers a network learns from at once (ppo). 0: the trainer's own.
@export_range(0, 4096, 1, "or_greater") var minibatch := 0
## How many steps a network learns from at once (dqn, sac). 0: the trainer's own.
@export_range(0, 4096, 1, "or_greater") var batch := 0
@export_group("PPO")
## How many steps of agents an update learns from. 0: the trainer's own.
@export_range(0, 65536, 1, "or_greater") var rollout := 0
## How often an update goes through them. 0: the trainer's own.
@export_range(0, 100, 1, "or_greater") var epochs := 0
## How far rewards to come count when an action is judged, such as 0.95. 0: the trainer's own.
@export_range(0, 1, 0.001) var gae_lambda := 0.0
## How much is given for trying different actions, such as 0.01.
@export_range(0, 1, 0.0001) var entropy_coefficient := 0.0
@export_group("More")
## Any other options of the trainer, by their names: {"target_every": 500}.
@export var more := {}
