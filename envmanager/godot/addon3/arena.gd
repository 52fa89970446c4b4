tool
class_name EnvManagerArena, "res://addons/envmanager/icons/arena.svg"
extends "res://addons/envmanager/agent.gd"
# An arena begins and ends the episodes of one copy of the scene. Put one into the scene, and override reset().
#
# Without agents in the scene the arena is the one agent. If a script has `func after_tick()`, it is called at the
# beginning of each tick, when the physics of the last one are done, until the episode has ended: the place for rewards
# and ends. Signals of the physics come before it.

# How this game is trained, and the parameters of its episodes.
export(Resource) var training = null
# How far apart the copies of the scene stand: more than the arena is wide.
export(float, 0, 100000) var spacing = 1000.0
# Scenes of agents that come later, when none of their behavior is there from the beginning.
export(Array, PackedScene) var joins = []
# The most agents of a behavior that are here at once; default: as many as in the scene.
export(Dictionary) var max_agents = {}

# Draw from nothing else: the same seed then repeats the same episode.
var rng: RandomNumberGenerator = RandomNumberGenerator.new()
# Which copy this is, from 0.
var index: int = 0
# Whether anybody may see it.
var shown: bool = true
# The root of this copy of the scene.
var root: Node = null


# Begins an episode. `options` are those of the trainer's last reset; their numbers are floats.
func reset(_rng: RandomNumberGenerator, _options: Dictionary) -> void:
	pass


# The value of a parameter in this episode: what the trainer has given, else what `training` declares, else `default`.
func parameter(of_name: String, default = null):
	if _copy != null and _copy.options.has(of_name):
		return _copy.options[of_name]
	if training != null:
		for declared in training.parameters:
			if declared != null and declared.name == of_name:
				return declared.value
	return default


# The episode of every agent here is over. The game goes on until the action's last tick, then comes reset().
func end_episode(truncated: bool = false) -> void:
	if _copy != null:
		_copy.end_episode(2 if truncated else 1)


func end(truncated: bool = false) -> void:
	end_episode(truncated)


# Puts a body where `to` says, in coordinates of the copy, with a velocity and without spin.
func place_2d(body: Node2D, to: Transform2D, velocity: Vector2 = Vector2.ZERO) -> void:
	var there = (root.global_transform if root is Node2D else Transform2D.IDENTITY) * to
	# In a signal of the physics a write is lost unless the transform was read since the body's last move.
	var _old = body.global_transform
	var is_synced = body.get("motion/sync_to_physics") == true  # then it would stay until the next tick
	if is_synced:
		body.set("motion/sync_to_physics", false)
	body.global_transform = there
	if is_synced:
		Physics2DServer.body_set_state(body.get_rid(), Physics2DServer.BODY_STATE_TRANSFORM, there)
		body.set("motion/sync_to_physics", true)
	if body is RigidBody2D:
		Physics2DServer.body_set_state(body.get_rid(), Physics2DServer.BODY_STATE_TRANSFORM, there)
		body.linear_velocity = velocity
		body.angular_velocity = 0.0
		body.sleeping = false


# Puts a body where `to` says, in coordinates of the copy, with a velocity and without spin.
func place_3d(body: Spatial, to: Transform, velocity: Vector3 = Vector3.ZERO) -> void:
	var there = (root.global_transform if root is Spatial else Transform.IDENTITY) * to
	var is_synced = body.get("motion/sync_to_physics") == true
	if is_synced:
		body.set("motion/sync_to_physics", false)
	body.global_transform = there
	if is_synced:
		PhysicsServer.body_set_state(body.get_rid(), PhysicsServer.BODY_STATE_TRANSFORM, there)
		body.set("motion/sync_to_physics", true)
	if body is RigidBody:
		PhysicsServer.body_set_state(body.get_rid(), PhysicsServer.BODY_STATE_TRANSFORM, there)
		body.linear_velocity = velocity
		body.angular_velocity = Vector3.ZERO
		body.sleeping = false


func _enter() -> void:
	_bridge.arena_entered(self)


func _notification(what: int) -> void:
	if what == NOTIFICATION_EXIT_TREE and _copy != null and is_instance_valid(_bridge):
		_bridge.arena_left(self)
